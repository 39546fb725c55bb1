"""What captured steps of one fit share: the programs, the reasons against them, the counts."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from zdtrain.capture.carried import Carried
from zdtrain.capture.conditions import Conditions
from zdtrain.capture.counters import Counters
from zdtrain.capture.guards import Numbers
from zdtrain.capture.key import Layouts
from zdtrain.capture.modules import changed_part
from zdtrain.capture.naming import CONDITIONS, LAYOUT, MODULE, Parts, parts_of, told_apart
from zdtrain.capture.observe import Observation
from zdtrain.capture.optimizers import Inside, inside, way_of
from zdtrain.capture.program import LeastRecentlyUsed
from zdtrain.capture.reach import Reach
from zdtrain.capture.recording import Recording
from zdtrain.capture.report import CaptureReport, ProgramReport
from zdtrain.capture.shared import OUT_OF_MEMORY, SharedCaptures
from zdtrain.config import Capture
from zdtrain.errors import FallbackReason

TRAINING_STEP = "training_step"
MAX_PROGRAMS = 8
WATCHED_STEPS = 2
MAX_MISFITS = 4
MAX_FIRST_LOGS = 4  # watched steps of one kind that are not compared for being an epoch's first to log a name
MAX_FAILURES = 2  # another thread's work on the device may spoil a capture
MAX_STATES = 64


@dataclass(kw_only=True)
class Entry:
    """Steps of one key: in warm-up, captured, or eager for a reason."""

    name: str
    """The key in words, but for the conditions."""
    key: tuple[Hashable, ...] = ()
    words: tuple[str, ...] = ()
    """What the parts of the key stand for."""
    warm: bool = False
    """Whether such a step ran, so that what is made lazily exists."""
    observations: list[Observation] = field(default_factory=list)
    """Watched steps, at most two."""
    carried: Carried | None = None
    """Tensor attributes that the step replaces."""
    updates: dict[str, int] = field(default_factory=dict)
    """Updates of torchmetrics metrics in one step, by module path."""
    reason: FallbackReason | None = None
    """Why these steps stay eager."""
    recording: Recording | None = None
    """The captured step."""
    several: Any = None
    """The program, where the entry stands for several steps: `RepeatedSteps`."""
    first_logs: int = 0
    """Watched steps that logged a name for the first time in their epoch."""
    failures: int = 0
    """Captures that failed."""
    misfits: int = 0
    """Steps since the last replay that the program could not run."""
    verified_in: int | None = None
    """Epoch in which the program was last compared with an eager step."""
    verification: str = "not yet"
    """Result of the last comparison, in words."""
    operations: int = 0
    replays: int = 0
    captures: int = 0
    verifications: int = 0
    capture_seconds: float = 0.0
    verify_seconds: float = 0.0
    includes_optimizer: bool = False

    def memory_bytes(self) -> int | None:
        """Return the device memory that the program keeps; None where there is none, or it keeps none of its own."""
        program = self.several if self.recording is None else self.recording.program
        memory: int | None = None if program is None else program.memory_bytes
        return memory

    def parts(self) -> Parts:
        """Return the parts of the key by what they stand for."""
        return parts_of(self.key, self.words)

    def report(self, session: "CaptureSession") -> ProgramReport:
        """Return what became of the program."""
        outcomes: Any = self.parts().get(CONDITIONS, ())
        return ProgramReport(
            step=session.step,
            key="; ".join([self.name, *map(str, session.conditions.true(outcomes))]),
            capture=session.capture,
            operations=self.operations,
            includes_optimizer=self.includes_optimizer,
            captures=self.captures,
            replays=self.replays,
            memory_bytes=self.memory_bytes(),
            capture_seconds=self.capture_seconds,
            verification=self.verification,
            verifications=self.verifications,
            verify_seconds=self.verify_seconds,
        )


class CaptureSession:
    """The programs of one fit. Addresses hold that long: Lightning moves everything to the host at its end.

    Args:
        capture: ``"graph"`` or ``"compile"``.
        verify: Compare every program with an eager step before it is trusted, and once an epoch.
        shared: What it has in common with the sessions of other steps: the device, above all.
        reach: What steps read past their module.
        several: Steps are to be part of programs for several.
        tell: Called with each new reason for an eager step.
        step: The step that is captured.
    """

    def __init__(
        self,
        *,
        capture: Capture,
        verify: bool,
        shared: SharedCaptures,
        reach: Reach,
        tell: Callable[[FallbackReason], None],
        step: str = TRAINING_STEP,
        several: bool = False,
    ) -> None:
        self.step = step
        self.shared = shared
        self.runtime = shared.runtime
        self.device_graphs = shared.runtime.has_graphs
        """Whether steps are captured in graphs of the device instead of op tapes."""
        self.several = several
        self.capture = capture
        self.verify = verify
        self.reach = reach
        self.conditions = Conditions()
        self.watch: Any = None  # the `Watch` of the step that runs now, if any
        self.counters: Counters | None = None  # of the step that is being watched or recorded
        self.epoch_in_key = False
        self.started = False  # whether a step ran
        self.steps_eager = 0
        self.steps_replayed = 0
        self.host_reads = 0
        self.loader_draws = False  # whether reading a batch moves the generator that steps draw from
        self.attributes: set[tuple[str, str]] = set()  # that watched steps read, by module path and name
        self.fingerprints = Numbers(MAX_STATES)  # of what programs hold by value of the host
        self.updates = Numbers(MAX_STATES)  # of what they hold of optimizers
        self.layouts = Layouts(MAX_STATES)  # of batches
        self._n_entries = 0
        self._newest: Entry | None = None  # kind of steps
        self._told_of_many = False
        self._inside: dict[int, tuple[Optimizer, Hashable, Inside | FallbackReason]] = {}  # by id of the optimizer
        self.fallbacks: dict[FallbackReason, None] = {}
        self._tell = tell
        self._reports: list[tuple[ProgramReport, Parts]] = []
        self._entries: LeastRecentlyUsed[Entry] = LeastRecentlyUsed(cap=MAX_PROGRAMS, evicted=self._keep_report)
        shared.sessions.append(self)

    def entry(
        self,
        key: tuple[Hashable, ...],
        name: Callable[[], str],
        words: Sequence[str] = (),
        changing: Callable[[], str | None] = lambda: None,
    ) -> Entry:
        """Return what is known of steps with `key`.

        Args:
            key: The key.
            name: Says it in words.
            words: What its parts stand for.
            changing: Says what of the batch was another value in the step before, if anything was.
        """
        entry = self._entries.get(key)
        if entry is None:
            verification = "not yet" if self.verify else "off"
            entry = Entry(name=name(), key=key, words=tuple(words), verification=verification)
            before, self._newest = self._newest, entry
            self._entries.add(key, entry)
            self._n_entries += 1
            many = self._n_entries > 4 * self._entries.cap and not self._told_of_many
            if many and self.steps_replayed < self.steps_eager:
                self._told_of_many = True
                what = f"there are over {4 * self._entries.cap} kinds of steps and {self._entries.cap} are kept: "
                why = changing() or self._what_changed(before, entry) or "pad batches to few shapes"
                self.note(FallbackReason(code="many-keys", message=what + why))
        return entry

    def _what_changed(self, before: Entry | None, entry: Entry) -> str:
        """Return in words what differs between two kinds of steps whose batches are alike, where that has a name."""
        old, new = {} if before is None else before.parts(), entry.parts()
        if old.get(LAYOUT) != new.get(LAYOUT):
            return ""
        what = self._change(old.get(MODULE), new.get(MODULE))
        return what and f"what differs is {what}; a number that changes belongs in a 0-D tensor, Trainer(scalars=...)"

    def make_room(self, kinds: int) -> None:
        """Keep as many programs for each of so many kinds of batches, such as those of several data loaders."""
        self._entries.cap = MAX_PROGRAMS * kinds

    def known(self, key: Hashable) -> Entry | None:
        """Return what is known of steps with `key`, if anything."""
        return self._entries.entries.get(key)

    def move(self, old: Hashable, new: tuple[Hashable, ...]) -> None:
        """Keep the steps of one key under another, because more is known of what belongs in it."""
        entries = self._entries.entries
        entries[new] = entries.pop(old)
        entries[new].key = new

    def _change(self, old: Hashable, new: Hashable) -> str:
        """Say what is different between two fingerprints, by their numbers; nothing where that is not known."""
        known: list[Any] = [self.fingerprints.state_of(number) for number in (old, new)]
        if None in known:
            return ""
        (inside, outside, _), (inside_now, outside_now, _) = known
        return next(self.reach.differing(outside, outside_now), "") or changed_part(inside, inside_now)

    def is_new(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer`, or what is called when it steps, is another one than `inside` knows."""
        known = self._inside.get(id(optimizer))
        return known is None or known[0] is not optimizer or known[1] != way_of(optimizer)

    def inside(self, optimizer: Optimizer) -> Inside | None:
        """Return how the optimizer's step is part of programs; None, with a reason noted, where it is not."""
        if self.is_new(optimizer):
            found = inside(optimizer, lowered=self.capture == "compile")
            self._inside[id(optimizer)] = (optimizer, way_of(optimizer), found)
        found = self._inside[id(optimizer)][-1]
        if isinstance(found, FallbackReason):
            self.note(found)
            return None
        return found

    def note(self, reason: FallbackReason) -> None:
        """Keep a reason and tell of it, once."""
        if self.step != TRAINING_STEP:
            reason = replace(reason, step=self.step)
        if reason not in self.fallbacks:
            self.fallbacks[reason] = None
            self._tell(reason)

    def refuse(self, entry: Entry, reasons: Sequence[FallbackReason]) -> None:
        """Leave the steps of `entry` eager if there is a reason to."""
        if not reasons:
            return
        entry.reason = reasons[0]
        entry.observations.clear()
        entry.recording = None
        for reason in reasons:
            self.note(reason)

    def fail(self, entry: Entry, reason: FallbackReason) -> None:
        """Leave the steps of `entry` eager, or, where it is for want of memory, all steps of the run."""
        if reason.code == OUT_OF_MEMORY:
            self.shared.give_up(reason)
        else:
            self.refuse(entry, [reason])

    def release(self) -> None:
        """Let go of all programs; what they did stays in the report."""
        for entry in self._entries.entries.values():
            self._keep_report(entry)
        self._entries.entries.clear()

    def memory_bytes(self) -> int:
        """Return the device memory that the programs keep."""
        return sum(entry.memory_bytes() or 0 for entry in self._entries.entries.values())

    def _keep_report(self, entry: Entry) -> None:
        if entry.captures:
            self._reports.append((entry.report(self), entry.parts()))
        entry.recording = entry.several = None

    def report(self) -> CaptureReport:
        """Return what captured steps did so far."""
        entries = [entry for entry in self._entries.entries.values() if entry.captures]
        current = [(entry.report(self), entry.parts()) for entry in entries]
        return CaptureReport(
            capture=self.capture,
            programs=tuple(told_apart([*self._reports, *current], self._change)),
            fallbacks=tuple(self.fallbacks),
            host_reads=self.host_reads,
            steps_eager=self.steps_eager,
            steps_replayed=self.steps_replayed,
        )
