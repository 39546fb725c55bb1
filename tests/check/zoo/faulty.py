"""Modules with one planted fault each, on the line that says so."""

from .case import Case
from .faulty_reads import CASES as READS
from .faulty_state import CASES as STATE
from .faulty_modules import CASES as MODULES

CASES: list[Case] = [*READS, *STATE, *MODULES]
