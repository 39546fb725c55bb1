"""A trained module as a file that torch alone runs (`torch.export`), compared with the module before it is kept."""

from zdtrain.export.module import export_module as export_module
from zdtrain.export.types import ExportError as ExportError
from zdtrain.export.types import ExportReport as ExportReport
from zdtrain.export.types import ParityError as ParityError

__all__ = ["ExportError", "ExportReport", "ParityError", "export_module"]
