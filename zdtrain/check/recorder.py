"""Notes what happens while a step runs, and turns the notes into findings."""

import contextlib
import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from zdtrain.check.findings import Finding, make_finding
from zdtrain.source.location import Location, code_kind, expression, locate

IN_STEP = frozenset(
    {
        "",
        "training_step",
        "validation_step",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "optimizer_step",
    }
)
"""Lightning hooks that run inside the part of a step that is captured."""

# Frames of stock Lightning that zdtrain's Trainer replaces with code that does not read: what they do is not reported.
_REPORTED_LIBRARIES = ("torch.optim.", "torchmetrics", "lightning.pytorch.callbacks", "torch.distributed")
_SERVED = (
    "lightning.pytorch.plugins.precision.amp",
    "torch.optim.lr_scheduler",
    "lightning.pytorch.callbacks.early_stopping",
    "lightning.pytorch.callbacks.model_checkpoint",
    "lightning.pytorch.callbacks.lr_monitor",
    "lightning.pytorch.callbacks.progress",
)

_EXPLICIT = (".item(", ".tolist(", ".numpy(")


def is_served(location: Location) -> bool:
    """Whether zdtrain's Trainer does without what happens here: stock Lightning does it on its own account."""
    library = location.library or ""
    if library.startswith(_SERVED):
        return True
    return not location.is_user and not library.startswith(_REPORTED_LIBRARIES)


@dataclasses.dataclass
class _Note:
    """One place where something happens, and how often in each step."""

    finding: Finding
    steps: dict[int, int] = dataclasses.field(default_factory=dict)


class Recorder:
    """Collects notes while it is armed.

    Args:
        boundary: code object of the function that drives the steps; frames around it belong to nobody.
    """

    def __init__(self, boundary: CodeType | None = None) -> None:
        self.boundary = boundary
        self.hook: Callable[[], str] = lambda: ""
        self.stage = "train"
        self.step = 0
        self.is_armed = False
        self.kernel_depth = 0
        """Above 0 inside a kernel, where a shadow tensor tells its true device."""
        self.leaving_depth = 0
        """Above 0 while a tensor is on its way to the host."""
        self._adopted: list[weakref.ref[torch.Tensor]] = []
        self._prune_at = 10_000
        self._muted = 0
        self._thread = threading.get_ident()
        self._notes: dict[tuple[object, ...], _Note] = {}

    @property
    def is_listening(self) -> bool:
        """Whether a note would be taken now; loader threads are none of the step's business."""
        return self.is_armed and not self._muted and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Take no notes inside: what runs here is the check's own work, or is done differently by zdtrain."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    def adopt(self, tensor: torch.Tensor) -> None:
        """Remember a tensor that was put on the shadow device, to take it off at the end."""
        self._adopted.append(weakref.ref(tensor))
        if len(self._adopted) > self._prune_at:
            self._adopted = [reference for reference in self._adopted if reference() is not None]
            self._prune_at = max(10_000, 2 * len(self._adopted))

    def adopted(self) -> list[torch.Tensor]:
        """The living tensors that were put on the shadow device."""
        living = (reference() for reference in self._adopted)
        return [tensor for tensor in living if tensor is not None]

    def locate(self) -> Location:
        """The user's line that is running."""
        return locate(self.boundary, torch._C._current_autograd_node())[0]

    def note(self, code: str, what: str, *, user_only: bool = False, is_explicit: bool = False, **fields: Any) -> None:
        """Take a note of `code` at the user's current line.

        Args:
            code: a name in `CODES`.
            what: the operation, e.g. ``"Tensor.item()"``.
            user_only: only if the user's own code does it, without a library call in between.
            is_explicit: the call that reads is there for all to see.
            fields: as for `add`.
        """
        if not self.is_listening:
            return
        location, frame = locate(self.boundary, torch._C._current_autograd_node())
        if user_only and (not location.is_user or location.library):
            return
        if is_served(location):
            return
        text = expression(frame)
        if code == "host-read" and not (is_explicit and not location.library):
            code = _kind_of_read(text, location)
        self.add(code, location, _message(what, text, location), **fields)

    def note_host_call(self, code: str, what: str) -> None:
        """Take a note of a call of a patched host function, when the user's own code makes it."""
        if self.is_listening and code_kind(sys._getframe(2).f_code) == "user":
            location, frame = locate(self.boundary)
            self.add(code, location, _message(what, expression(frame), location))

    def add(self, code: str, location: Location, message: str, **fields: Any) -> None:
        """Count one occurrence of `code` at `location`.

        Args:
            code: a name in `CODES`.
            location: where.
            message: what.
            fields: other fields of the finding, instead of the running hook and the severity of the code.
        """
        hook = fields.setdefault("hook", self.hook())
        key = (code, location.file, location.line, location.library, self.stage, hook)
        note = self._notes.get(key)
        if note is None:
            finding = make_finding(
                code,
                message,
                file=location.file or None,
                line=location.line or None,
                function=location.function or None,
                library=location.library,
                stage=self.stage,
                in_step=hook in IN_STEP,
                **fields,
            )
            note = self._notes[key] = _Note(finding)
        note.steps[self.step] = note.steps.get(self.step, 0) + 1

    def findings(self, first_step: int = 0, num_steps: Mapping[str, int] | None = None) -> list[Finding]:
        """The findings, with their count per step.

        Args:
            first_step: what happened only before it is left out: the first step fills caches and optimizer state.
            num_steps: steps that ran in each stage; without it, the steps in which something happened are counted.
        """
        found = []
        for note in self._notes.values():
            total = (num_steps or {}).get(note.finding.stage, 0)
            start = first_step if num_steps is None or total > first_step else 0
            counts = [count for step, count in note.steps.items() if step >= start]
            if counts:
                per_step = sum(counts) / (total - start if total else len(counts))
                found.append(dataclasses.replace(note.finding, count=per_step))
        return found


def _kind_of_read(text: str, location: Location) -> str:
    """Tell an explicit read from an implicit one and from one inside a library."""
    if location.library:
        return "library-host-read"
    explicit = any(call in text for call in _EXPLICIT) or text.startswith(("float(", "int(", "bool("))
    return "host-read" if explicit else "implicit-host-read"


def _message(what: str, text: str, location: Location) -> str:
    message = f"`{text}`: {what}" if text else what
    if location.library:
        message += f", in {location.library}"
    return message


active: Recorder | None = None
"""The recorder of the shadow device that is on, if any. Set by `zdtrain.check.shadow` only."""


def note(code: str, what: str) -> None:
    """Take a note if a shadow device is on."""
    if active is not None:
        active.note(code, what)
