"""Monitors: conditions on a run's values that act in the very step in which they hold.

Example::

    Trainer(monitors=[Threshold("loss", above=100.0, then="stop"), NonFinite("loss", then="skip")])
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zdtrain.monitor.base import Monitor as Monitor
    from zdtrain.monitor.conditions import NonFinite as NonFinite
    from zdtrain.monitor.conditions import Plateau as Plateau
    from zdtrain.monitor.conditions import Spike as Spike
    from zdtrain.monitor.conditions import Threshold as Threshold
    from zdtrain.monitor.events import MonitorEvent as MonitorEvent
    from zdtrain.monitor.events import MonitorWarning as MonitorWarning
    from zdtrain.monitor.events import Row as Row
    from zdtrain.monitor.functions import When as When
    from zdtrain.monitor.statistics import Statistics as Statistics

_LAZY = {
    "Monitor": "base",
    "MonitorEvent": "events",
    "MonitorWarning": "events",
    "NonFinite": "conditions",
    "Plateau": "conditions",
    "Row": "events",
    "Spike": "conditions",
    "Statistics": "statistics",
    "Threshold": "conditions",
    "When": "functions",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"zdtrain.monitor.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'zdtrain.monitors' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
