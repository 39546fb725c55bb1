"""What became of the steps of a run: programs, replays, and why others stayed eager."""

from dataclasses import dataclass

from zdtrain.errors import FallbackReason


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One captured program."""

    key: str
    """What it was captured for, in words: input shapes, accumulation phase."""
    capture: str
    """``"graph"`` or ``"compile"``."""
    operations: int
    """Recorded ATen operations; 0 where the device does not tell."""
    includes_optimizer: bool
    """Whether the optimizer's step is inside."""
    captures: int
    """How often it was captured."""
    replays: int
    """Steps that it ran."""
    capture_seconds: float
    """Host time of the captures, compilation included."""
    verification: str
    """``"equal"``, ``"within tolerance"``, ``"off"``, ``"not yet"``, or what differed."""
    verifications: int
    """How often it was compared with an eager step."""
    verify_seconds: float
    """Host time of the comparisons."""


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """What captured steps did in a run."""

    capture: str
    """The option in effect: ``"off"``, ``"graph"`` or ``"compile"``."""
    programs: tuple[ProgramReport, ...] = ()
    """One for each program that was captured, evicted ones included."""
    fallbacks: tuple[FallbackReason, ...] = ()
    """Why steps, or parts of them, ran eagerly."""
    host_reads: int = 0
    """Host reads seen in watched steps."""
    steps_eager: int = 0
    """Steps that ran eagerly: warm-up, verification and fallbacks."""
    steps_replayed: int = 0
    """Steps that a program ran; a step during which one is recorded counts too."""

    def table(self) -> str:
        """Return the report as a short table."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"Captured steps (capture={self.capture!r})", title_justify="left")
        for column in ("program", "replays", "captures", "capture s", "verified", "verify s"):
            table.add_column(column)
        for program in self.programs:
            table.add_row(
                program.key,
                str(program.replays),
                str(program.captures),
                f"{program.capture_seconds:.2f}",
                program.verification,
                f"{program.verify_seconds:.2f}",
            )
        table.add_row("eager", str(self.steps_eager), "", "", "", "")
        console = Console(width=110, highlight=False)
        with console.capture() as captured:
            console.print(table)
            for reason in self.fallbacks:
                console.print(f"- {reason}", markup=False, soft_wrap=True)
        return captured.get().rstrip()
