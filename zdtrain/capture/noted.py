"""Stand-ins that a step gets while it is watched, so that reading or logging numbers is noticed."""

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from zdtrain.capture.counters import counters_in, plain
from zdtrain.capture.watch import Watch

_LOG = inspect.signature(LightningModule.log)

_READS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("divmod", "rdivmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift"),
    *("rshift", "rrshift", "neg", "pos", "abs", "invert", "round", "index", "int", "float", "bool", "hash"),
    *("eq", "ne", "lt", "le", "gt", "ge", "str", "repr", "format"),
)


class NotedInteger(int):
    """An integer that tells a watch when the step uses it; equal to the plain one in every way.

    Args:
        value: The integer.
        used: Called with each use.
    """

    used: Callable[[], None]

    def __new__(cls, value: int, used: Callable[[], None]) -> "NotedInteger":
        """Make an integer."""
        integer = super().__new__(cls, value)
        integer.used = used
        return integer


def _noted(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def read(self: NotedInteger, *args: Any) -> Any:
        self.used()
        return method(self, *args)

    return read


for _name in _READS:
    setattr(NotedInteger, f"__{_name}__", _noted(f"__{_name}__"))


class NotedLog:
    """Passes `self.log` calls on and tells a watch what a replay would repeat of them.

    Args:
        module: The module whose `self.log` it is.
        log: What `self.log` is otherwise.
        watch: Whom to tell.
    """

    def __init__(self, module: LightningModule, log: Callable[..., None], watch: Watch) -> None:
        self._attributes = module.__dict__
        self._log = log
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Log."""
        call = _LOG.bind(None, *args, **kwargs).arguments
        size, value = call.get("batch_size"), call["value"]
        self._watch.note_logged(
            self._attributes["_current_fx_name"],
            call["name"],
            float(plain(value)) if isinstance(value, Real) else None,
            None if isinstance(size, Tensor) else size,
        )
        for counter in counters_in((args, kwargs)):
            counter.counters.refuse(counter.number)
        self._log(*args, **kwargs)
