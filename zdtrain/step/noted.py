"""Stand-ins that a step gets while it is watched, so that reading them is noticed."""

from collections.abc import Callable
from numbers import Number
from typing import Any

from zdtrain.step.watch import Watch

_READS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("divmod", "rdivmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift"),
    *("rshift", "rrshift", "neg", "pos", "abs", "invert", "round", "index", "int", "float", "bool", "hash"),
    *("eq", "ne", "lt", "le", "gt", "ge", "str", "repr", "format"),
)


class NotedIndex(int):
    """A batch index that tells a watch when the step uses it; equal to the plain integer in every way.

    Args:
        value: The index.
        watch: Whom to tell.
    """

    watch: Watch

    def __new__(cls, value: int, watch: Watch) -> "NotedIndex":
        """Make an index."""
        index = super().__new__(cls, value)
        index.watch = watch
        return index


def _noted(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def read(self: NotedIndex, *args: Any) -> Any:
        self.watch.note("batch-idx", "the step uses batch_idx, which a replay does not see")
        return method(self, *args)

    return read


for _name in _READS:
    setattr(NotedIndex, f"__{_name}__", _noted(f"__{_name}__"))


class NotedLog:
    """Passes `self.log` calls on and tells a watch of Python numbers among the values.

    Args:
        log: What `self.log` is otherwise.
        watch: Whom to tell.
    """

    def __init__(self, log: Callable[..., None], watch: Watch) -> None:
        self._log = log
        self._watch = watch

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log."""
        if isinstance(value, Number):
            self._watch.note(
                "logged-number",
                f"self.log({name!r}, ...) gets a Python number, which a replay would repeat for ever: log a tensor, "
                "or log it in a hook outside the step",
            )
        self._log(name, value, *args, **kwargs)
