"""Watches a LightningModule while a Trainer runs it: where each step begins and ends, and what changed in between."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from zdtrain.capture.conditions import Condition, Number
from zdtrain.capture.counters import Counters
from zdtrain.capture.optimizers import outside_reason
from zdtrain.check import state
from zdtrain.check.audit import GradientWatch, audit_devices, audit_registration
from zdtrain.check.findings import Finding, make_finding
from zdtrain.check.optimizers import group_options, make_capturable, schedule_states
from zdtrain.check.recorder import IN_STEP, Recorder
from zdtrain.check.shadow import ShadowDevice
from zdtrain.check.trace import Operation
from zdtrain.errors import FallbackReason
from zdtrain.scalars import DeviceScalars
from zdtrain.source.definitions import line_matching, method_location
from zdtrain.source.location import Location, code_kind, expression

WRAPPED = frozenset({"training_step", "validation_step", "on_after_batch_transfer", "on_train_batch_end", "log"})

_CHANGES_A_GROUP = (r"""\[["']\w+["']\]\s*[-+*/]?=[^=]""", r"param_groups")
_STEPS_A_SCHEDULER = (r"sched\w*(\(\))?\.step\(", r"lr_schedulers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step that ran."""

    stage: str
    """``train`` or ``validation``."""
    signature: object
    """Equal for steps that a single captured program could serve."""
    operations: list[Operation]
    """Those inside the captured part of the step."""
    num_tensors: int
    """Device tensors made."""
    num_bytes: int
    """Bytes of those."""


class ObservedCounters(Counters):
    """Notes the uses of batch_idx and global_step that a captured step would not serve.

    Args:
        recorder: Takes the notes.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__({}, recorder.boundary)
        self._recorder = recorder

    def start(self, batch_idx: int, global_step: int) -> None:
        """Begin a step."""
        self.values = {"batch_idx": batch_idx, "global_step": global_step}
        self.conditions.clear()

    def answers(self) -> frozenset[tuple[Condition, bool]]:
        """Return what the step asked, and the answers: a captured step has a program for each set of them."""
        return frozenset((condition, condition.holds(self.values)) for condition in self.conditions)

    def _place(self) -> Location | None:
        recorder = self._recorder
        if not recorder.is_listening or recorder.hook() not in IN_STEP:
            return None
        place = recorder.locate()
        return place if place.is_user else None

    def refuse(self, number: Number) -> None:
        """Take a note."""
        self._recorder.note("step-counter", f"{number} as a number")


def note_counter(recorder: Recorder, code: str, name: str, *, depth: int) -> None:
    """Take a note if the user's own code, inside the step, looks at a counter of the loop."""
    if not recorder.is_listening or recorder.hook() not in IN_STEP:
        return
    frame = sys._getframe(depth)
    if frame.f_code.co_filename.endswith("module.py") and frame.f_code.co_name == name and frame.f_back is not None:
        frame = frame.f_back  # LightningModule.global_step and current_epoch ask the trainer
    if code_kind(frame.f_code) == "user":
        location = Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        recorder.add(code, location, f"`{expression(frame) or name}` looks at {name}")


class ObservedTrainer(Trainer):
    """Stock Lightning's Trainer, whose counters note when a step looks at them."""

    recorder: Recorder | None = None
    counters: "ObservedCounters | None" = None
    device_scalars: DeviceScalars
    uses_scalars = False

    @property
    def scalars(self) -> DeviceScalars:
        """The run's scalars, as zdtrain's Trainer has them."""
        self.uses_scalars = True
        return self.device_scalars.to(self.strategy.root_device)

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        value: int = super().global_step
        return value if self.counters is None else self.counters.read("global_step", value)

    @property
    def current_epoch(self) -> int:
        """Epochs finished."""
        if self.recorder is not None:
            note_counter(self.recorder, "epoch-counter", "current_epoch", depth=2)
        return super().current_epoch


def _signature(batch: Any) -> object:
    leaves, tree = pytree.tree_flatten(batch)
    described = tuple(
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, bool | int | float | str)
        else type(leaf)
        for leaf in leaves
    )
    return str(tree), described


class Observer(Callback):
    """A callback that comes first, together with wrappers around a few methods of the module.

    Args:
        device: the shadow device that is on.
        module: the module that will be trained.
    """

    def __init__(self, device: ShadowDevice, module: LightningModule) -> None:
        self.device = device
        self.module = module
        self.recorder = device.recorder
        self.steps: list[Step] = []
        self.audits: list[Finding] = []
        self.logged: dict[tuple[str, str], list[tuple[Location, float]]] = {}
        """Python numbers given to `self.log`, by stage and name, after the first step."""
        self.outside: list[tuple[Optimizer, FallbackReason | None]] = []
        """Every optimizer, and why its step would be no part of a capture."""
        self.gradients: GradientWatch | None = None
        self._index = {"train": 0, "validation": 0}
        self._first_born = 0
        self._batch_signature: object = None
        self._before: tuple[state.Fingerprint, dict[str, tuple[int, int]]] | None = None
        self.counters = ObservedCounters(self.recorder)

    # ---- wrappers around the module's methods
    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Wrap the module's methods inside."""
        self.recorder.hook = lambda: self.module._current_fx_name or ""
        wrappers = {
            "training_step": self._wrap_step("training_step", self._after_training_step),
            "validation_step": self._wrap_step("validation_step", lambda result: result),
            "on_after_batch_transfer": self._wrap_transfer(),
            "on_train_batch_end": self._wrap_batch_end(),
            "log": self._wrap_log(),
        }
        self.module.__dict__.update(wrappers)
        try:
            yield
        finally:
            self.recorder.hook = lambda: ""
            for name in wrappers:
                del self.module.__dict__[name]
            if self.gradients is not None:
                self.gradients.remove()

    def _wrap_step(self, name: str, after: Callable[[Any], Any]) -> Callable[..., Any]:
        original = getattr(self.module, name)
        names = list(inspect.signature(original).parameters)
        position = names.index("batch_idx") if "batch_idx" in names else len(names)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._before = self._snapshot()
            takes_index = position < len(args)
            self.counters.start(args[position] if takes_index else 0, self.module.trainer.global_step)
            self._batch_signature = _signature(args[0]) if args else None
            if takes_index:
                index = self.counters.stand_in("batch_idx", args[position])
                args = (*args[:position], index, *args[position + 1 :])
            trainer = self.module.trainer
            options, schedules = group_options(trainer.optimizers), schedule_states(trainer, self.module)
            result = original(*args, **kwargs)
            if schedule_states(trainer, self.module) != schedules:
                place = line_matching(self.module, name, _STEPS_A_SCHEDULER)
                self.recorder.add("scheduler-by-hand", place, f"{name} steps a learning-rate scheduler")
            elif group_options(trainer.optimizers) != options:
                place = line_matching(self.module, name, _CHANGES_A_GROUP)
                self.recorder.add("lr-replaced", place, f"{name} changes an option of an optimizer's param_group")
            return after(result)

        return step

    def _wrap_transfer(self) -> Callable[..., Any]:
        original = self.module.on_after_batch_transfer

        @functools.wraps(original)
        def transfer(*args: Any, **kwargs: Any) -> Any:
            stage = "train" if self.module.trainer.training else "validation"
            self.recorder.stage, self.recorder.step = stage, self._index[stage]  # the step that is about to begin
            with self.device.recording():
                return original(*args, **kwargs)

        return transfer

    def _wrap_batch_end(self) -> Callable[..., Any]:
        original = self.module.on_train_batch_end

        @functools.wraps(original)
        def batch_end(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._end_step()
            return result

        return batch_end

    def _wrap_log(self) -> Callable[..., Any]:
        original = self.module.log

        @functools.wraps(original)
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, bool | int | float) and self.recorder.is_listening:
                self.recorder.note("logged-number", f"`{name}` is a Python {type(value).__name__}")
                if self.recorder.hook() in IN_STEP and self.recorder.step > 0:
                    place = self.recorder.locate()
                    self.logged.setdefault((self.recorder.stage, name), []).append((place, float(value)))
            with self.recorder.muted():
                try:
                    original(name, value, *args, **kwargs)
                    return
                except MisconfigurationException as error:
                    refusal = str(error)
                    if "You can't" not in refusal:
                        raise
            place = self.recorder.locate()
            fields = {"file": place.file or None, "line": place.line or None, "function": place.function}
            finding = make_finding("log-outside-hook", refusal, **fields, stage="module")
            if finding not in self.audits:
                self.audits.append(finding)

        return log

    def _after_training_step(self, result: Any) -> Any:
        """Note a loss that is not a scalar, and go on with its mean."""
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, torch.Tensor) or loss.dim() == 0:
            return result
        made = [item.location for item in self.device.born if item.reference() is loss]
        place = made[-1] if made else method_location(self.module, "training_step")
        severity = "warning" if loss.numel() == 1 else "error"  # torch takes the gradient of one element
        self.recorder.add("loss-shape", place, f"the loss has shape {tuple(loss.shape)}", severity=severity)
        with self.recorder.muted():
            mean = loss.mean()
        return {**result, "loss": mean} if isinstance(result, dict) else mean

    # ---- callback hooks: where steps begin and end
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the optimizers what they would be inside a capture."""
        for optimizer in trainer.optimizers:
            make_capturable(optimizer)
            self.outside.append((optimizer, outside_reason(optimizer)))  # now, while it is on the device
        self.gradients = GradientWatch(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a training step."""
        if self._index["train"] == 0:
            self.audits += audit_registration(pl_module, WRAPPED)
            self.audits += audit_devices(pl_module)
        self._write_counter(trainer)
        self._begin_step("train")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the module's state before and after the captured part of the step."""
        self._compare_state("training_step")
        if self.gradients is not None:
            self.gradients.look_at_grad_fields()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a validation step."""
        self._begin_step("validation")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End a validation step."""
        self._compare_state("validation_step")
        self._batch_signature = (self._batch_signature, dataloader_idx)
        self._end_step()

    @staticmethod
    def _write_counter(trainer: Trainer) -> None:
        """Keep the device's step counter true, as zdtrain's Trainer does between steps."""
        if isinstance(trainer, ObservedTrainer) and trainer.uses_scalars:
            trainer.scalars.global_step = trainer.global_step

    def _begin_step(self, stage: str) -> None:
        self.recorder.stage = stage
        self.device.start_step(self._index[stage])
        self._first_born = len(self.device.born)
        self.recorder.is_armed = True

    def _end_step(self) -> None:
        self.recorder.is_armed = False
        trainer = self.module.trainer
        stage = self.recorder.stage
        index = self._index[stage]
        phase = index % trainer.accumulate_grad_batches if stage == "train" else 0
        self.steps.append(
            Step(
                stage=stage,
                signature=(self._batch_signature, phase, self.counters.answers()),
                operations=[op for op in self.device.operations if op.context.hook in IN_STEP],
                num_tensors=len(self.device.born) - self._first_born,
                num_bytes=self.device.made_bytes,
            )
        )
        self._index[stage] += 1

    # ---- state
    def _snapshot(self) -> tuple[state.Fingerprint, dict[str, tuple[int, int]]]:
        with self.recorder.muted():
            tensors = state.tensor_bindings(self.module, WRAPPED)
            addresses = {
                path: (id(tensor), tensor.data_ptr() if tensor.layout == torch.strided else 0)
                for path, tensor in tensors.items()
            }
            return state.python_state(self.module, WRAPPED), addresses

    def _compare_state(self, hook: str) -> None:
        """Note what `hook`'s step changed that a replay would not change."""
        before, self._before = self._before, None
        if before is None or self._index[self.recorder.stage] == 0:  # the first step may fill caches
            return
        (python_before, tensors_before), (python_after, tensors_after) = before, self._snapshot()
        bindings = state.tensor_bindings(self.module, WRAPPED)
        rebound = {path for path, was in tensors_before.items() if tensors_after.get(path, was) != was}
        for path in sorted(rebound):
            code = "kept-graph" if bindings[path].grad_fn is not None else "rebound-tensor"
            # a captured step copies the new value of a plain attribute back; it does not look into containers
            severity = "error" if "[" in path else "warning"
            self._note_change(code, path, f"`{path}` names another tensor after the step", hook, severity=severity)
        for path in sorted(python_before.keys() | python_after.keys()):
            if path in rebound or python_before.get(path) == python_after.get(path):
                continue
            held = [tensor for item, tensor in bindings.items() if item.startswith(f"{path}[")]
            if held:
                code = "kept-graph" if held[-1].grad_fn is not None else "kept-tensor"
                self._note_change(code, path, f"the step adds tensors to `{path}`", hook)
            else:
                self._note_change("python-state", path, f"the step changes `{path}`", hook)

    def _note_change(self, code: str, path: str, message: str, hook: str, **fields: Any) -> None:
        self.recorder.add(code, state.change_location(self.module, path), message, hook=hook, **fields)
