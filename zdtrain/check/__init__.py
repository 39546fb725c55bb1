"""Know before renting the GPU: run a training step on a simulated device and see what would make the GPU wait."""

from zdtrain.check.api import assert_capturable, assert_no_host_reads, check_step
from zdtrain.check.findings import CODES, Code, Finding
from zdtrain.check.formats import FORMATS
from zdtrain.check.report import CheckReport, StageReport
from zdtrain.check.shadow import ShadowDevice

__all__ = [
    "CODES",
    "FORMATS",
    "CheckReport",
    "Code",
    "Finding",
    "ShadowDevice",
    "StageReport",
    "assert_capturable",
    "assert_no_host_reads",
    "check_step",
]
