"""What the linter reports."""

import enum
from dataclasses import dataclass

from zdtrain.lint.heat import Heat


class Severity(enum.IntEnum):
    """How much a finding matters; the default level shows ``WARNING`` and above."""

    NOTE = 0
    """True, but off the path that runs once per step."""
    WARNING = 1
    """Costs time in every step, breaks a capture, or is a likely mistake."""
    ERROR = 2
    """The host waits for the device in every step, or the code is wrong."""

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of source text, by line (from 1) and column (in UTF-8 bytes, from 0, as ``ast`` counts)."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One problem at one place."""

    path: str
    line: int
    column: int
    """Counted from 1, in characters."""
    code: str
    message: str
    severity: Severity = Severity.WARNING
    heat: Heat = Heat.COLD
    end_line: int = 0
    edits: tuple[Edit, ...] = ()
    """What ``--fix`` would write; empty where the fix is not certain."""
    confirmed: bool = False
    """Whether a dynamic check saw a problem on the same line."""
