"""What an export says: its report and its errors."""

from dataclasses import dataclass
from pathlib import Path

from zdtrain.errors import ZDTrainError


class ExportError(ZDTrainError, RuntimeError):
    """A module cannot be exported; nothing was written."""


class ParityError(ExportError):
    """The exported program does not compute what the module does; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was exported, and how it compares with the module."""

    path: Path
    """The file, for ``torch.export.load(path).module()``."""
    num_bytes: int
    """Its size."""
    batch_sizes: tuple[int, ...]
    """Batch sizes at which the outputs of the loaded file and of the module were compared."""
    dynamic: tuple[str, ...]
    """Inputs whose dimension 0 may have any size, the same for all; all other sizes are those of the examples."""
    bit_equal: bool
    """Whether every output was equal to the last bit."""
    max_abs_difference: float
    """The largest |exported - module| over all outputs."""
    max_rel_difference: float
    """The largest |exported - module| / |module| over all outputs, where the module's is not 0."""

    def __str__(self) -> str:
        equal = "equal to the module to the last bit"
        if not self.bit_equal:
            differences = f"{self.max_abs_difference:.3g} absolute, {self.max_rel_difference:.3g} relative"
            equal = f"equal to the module within torch.testing's tolerances (at most {differences})"
        what = "batch sizes" if len(self.batch_sizes) > 1 else "batch size"
        sizes = f" at {what} {', '.join(map(str, self.batch_sizes))}" if self.batch_sizes else ""
        batch = f"any batch size ({', '.join(self.dynamic)})" if self.dynamic else "the batch size of the examples only"
        return f"{self.path} ({self.num_bytes:,} bytes): {equal}{sizes}; takes {batch}"
