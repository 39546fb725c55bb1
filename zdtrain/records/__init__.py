"""Run folders: what a run writes down about itself, and reading it back.

Names load on first use, so that the record types can be imported without lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zdtrain.records.reader import Run as Run
    from zdtrain.records.reader import find_runs as find_runs
    from zdtrain.records.reader import load_run as load_run
    from zdtrain.records.recorder import RecordCallback as RecordCallback
    from zdtrain.records.recorder import RunRecorder as RunRecorder
    from zdtrain.records.types import RecordError as RecordError
    from zdtrain.records.types import RecordWarning as RecordWarning
    from zdtrain.records.types import StepRecord as StepRecord

_LAZY = {
    "RecordCallback": "recorder",
    "RecordError": "types",
    "RecordWarning": "types",
    "Run": "reader",
    "RunRecorder": "recorder",
    "StepRecord": "types",
    "find_runs": "reader",
    "load_run": "reader",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'zdtrain.records' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
