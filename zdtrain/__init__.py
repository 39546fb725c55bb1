"""zdtrain: a drop-in Lightning Trainer whose training loop never makes the GPU wait.

Root names load on first use (PEP 562), so that ``import zdtrain.optim`` does not import lightning and
``import zdtrain.lint`` does not import torch.
"""

from typing import TYPE_CHECKING

from zdtrain.lazy import lazily

if TYPE_CHECKING:
    from zdtrain.marks import only_reads as only_reads
    from zdtrain.scalars import DeviceScalars as DeviceScalars
    from zdtrain.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PARTS = {"check", "data", "export", "metrics", "monitors", "optim", "records", "stats", "weights"}
_LAZY = {"DeviceScalars": "zdtrain.scalars", "Trainer": "zdtrain.trainer", "only_reads": "zdtrain.marks"}

__all__ = ["DeviceScalars", "Trainer", "__version__", "only_reads"]

__getattr__, __dir__ = lazily(__name__, _LAZY, parts=_PARTS)
