"""Monitors: conditions on a run's values that act in the very step in which they hold.

Example::

    Trainer(monitors=[Threshold("loss", above=100.0, then="stop"), NonFinite("loss", then="skip")])
"""

from typing import TYPE_CHECKING

from zdtrain.lazy import lazily

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
    "Monitor": "zdtrain.monitor.base",
    "MonitorEvent": "zdtrain.monitor.events",
    "MonitorWarning": "zdtrain.monitor.events",
    "NonFinite": "zdtrain.monitor.conditions",
    "Plateau": "zdtrain.monitor.conditions",
    "Row": "zdtrain.monitor.events",
    "Spike": "zdtrain.monitor.conditions",
    "Statistics": "zdtrain.monitor.statistics",
    "Threshold": "zdtrain.monitor.conditions",
    "When": "zdtrain.monitor.functions",
}

__all__ = sorted(_LAZY)

__getattr__, __dir__ = lazily(__name__, _LAZY)
