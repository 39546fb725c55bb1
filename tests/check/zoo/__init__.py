"""Small modules whose findings are known: `CASES` lists them all, `CLEAN` and `FAULTY` its two halves."""

from .case import Case
from .clean import CASES as CLEAN
from .faulty import CASES as FAULTY

CASES = [*CLEAN, *FAULTY]

__all__ = ["CASES", "CLEAN", "FAULTY", "Case"]
