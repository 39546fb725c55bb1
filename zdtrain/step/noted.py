"""What `self.log` is while a step is watched, so that Python numbers among the values are noticed."""

from collections.abc import Callable
from numbers import Number
from typing import Any

from zdtrain.step.counters import counters_in
from zdtrain.step.watch import Watch


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
        for counter in counters_in((args, kwargs)):
            counter.counters.refuse(counter.number)
        self._log(name, value, *args, **kwargs)
