"""Modules with one planted fault each, on the line that says so."""

from .case import Case
from .faulty_modules import CASES as MODULES
from .faulty_reads import CASES as READS
from .faulty_state import CASES as STATE

CASES: list[Case] = [*READS, *STATE, *MODULES]
