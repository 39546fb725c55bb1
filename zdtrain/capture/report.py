"""What became of the steps of a run: programs, replays, and why others stayed eager."""

from dataclasses import dataclass, replace

from zdtrain.errors import FallbackReason


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One captured program."""

    step: str
    """What it is of: ``"training_step"``, ``"validation_step"`` or ``"test_step"``."""
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
    memory_bytes: int | None
    """Device memory that it keeps between replays: input buffers, and by how much the pool of graphs grew for it. None
    on the host, where a replay allocates and frees like the step itself, and for a program that was given up."""
    capture_seconds: float
    """Host time of the captures, compilation included."""
    verification: str
    """``"equal"``, ``"within tolerance"`` (lowered, or eager steps differ, too), ``"off"``, ``"not yet"``, or what
    differed."""
    verifications: int
    """How often it was compared with an eager step."""
    verify_seconds: float
    """Host time of the comparisons."""

    def row(self) -> tuple[str, ...]:
        """Return the program's line of the table."""
        return (
            self.key if self.step == "training_step" else f"{self.step}: {self.key}",
            str(self.replays),
            str(self.captures),
            f"{self.capture_seconds:.2f}",
            readable(self.memory_bytes),
            self.verification,
            f"{self.verify_seconds:.2f}",
        )


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
    """Training steps that ran eagerly: warm-up, verification and fallbacks."""
    steps_replayed: int = 0
    """Training steps that a program ran; a step during which one is recorded counts too."""
    evaluation_eager: int = 0
    """Validation and test steps that ran eagerly."""
    evaluation_replayed: int = 0
    """Validation and test steps that a program ran."""

    def with_evaluation(self, other: "CaptureReport") -> "CaptureReport":
        """Return this report of training steps together with one of evaluation steps."""
        return replace(
            self,
            capture=other.capture,
            programs=(*self.programs, *other.programs),
            fallbacks=(*self.fallbacks, *other.fallbacks),
            host_reads=self.host_reads + other.host_reads,
            evaluation_eager=self.evaluation_eager + other.steps_eager,
            evaluation_replayed=self.evaluation_replayed + other.steps_replayed,
        )

    def summary(self) -> str:
        """Return the report as one line for whoever did not ask for captured steps; nothing where there were none."""
        counts = {"training": (self.steps_replayed, self.steps_eager)}
        counts["evaluation"] = (self.evaluation_replayed, self.evaluation_eager)
        said = [f"{n} of {n + eager} {kind} steps were replays" for kind, (n, eager) in counts.items() if n]
        if self.fallbacks:
            more = len(self.fallbacks) - 1
            said.append(f"not captured: {self.fallbacks[0]}" + (f" and {more} more" if more else ""))
        where = 'trainer.capture_report has the details, capture="off" does without'
        return f"zdtrain: {', '.join(said)}; {where}" if said else ""

    def table(self) -> str:
        """Return the report as a short table."""
        eager = {"eager": self.steps_eager, "eager evaluation": self.evaluation_eager}
        rows = [
            ("program", "replays", "captures", "capture s", "memory", "verified", "verify s"),
            *(program.row() for program in self.programs),
            *((name, str(steps), "", "", "", "", "") for name, steps in eager.items() if steps),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        title, head, body = f"Captured steps (capture={self.capture!r})", lines[0], lines[1:]
        table = [title, head, "-" * len(head), *body] if body else [f"{title}: none"]
        return "\n".join([*table, *(f"- {reason}" for reason in self.fallbacks)])


def readable(size: int | None) -> str:
    """Return a number of bytes in words, an empty string for None."""
    if size is None:
        return ""
    unit = min(3, max(0, (size.bit_length() - 1) // 10))
    return f"{size / 1024**unit:.{min(unit, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
