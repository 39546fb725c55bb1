"""Run folders: what a run writes down about itself, and reading it back.

Names load on first use, so that the record types can be imported without lightning.
"""

from typing import TYPE_CHECKING

from zdtrain.lazy import lazily

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
    "RecordCallback": "zdtrain.records.recorder",
    "RecordError": "zdtrain.records.types",
    "RecordWarning": "zdtrain.records.types",
    "Run": "zdtrain.records.reader",
    "RunRecorder": "zdtrain.records.recorder",
    "StepRecord": "zdtrain.records.types",
    "find_runs": "zdtrain.records.reader",
    "load_run": "zdtrain.records.reader",
}

__all__ = sorted(_LAZY)

__getattr__, __dir__ = lazily(__name__, _LAZY)
