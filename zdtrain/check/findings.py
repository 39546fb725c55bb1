"""What a check can find: the catalogue of codes, and one finding."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""From worst to mildest."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """One kind of finding."""

    name: str
    """Stable machine-readable name, e.g. ``"host-read"``."""
    title: str
    """What is wrong, in one sentence."""
    remedy: str
    """What to write instead."""
    severity: Severity = "error"
    """``error``: the GPU waits, or a capture fails; ``warning``: likely a mistake; ``note``: good to know."""
    reads: bool = False
    """Whether each occurrence makes the host wait for the device."""
    blocks: bool = False
    """Whether a step with this finding inside it cannot be captured as it is."""
    fixable: bool = True
    """Whether a local rewrite of the step removes it."""


_ALL = (
    # ---- host reads
    Code(
        name="host-read",
        title="the step reads a device tensor on the host",
        remedy="keep the value on the device: pass the tensor on, log the tensor itself, compare with torch.where",
        reads=True,
        blocks=True,
    ),
    Code(
        name="implicit-host-read",
        title="a Python operation on a device tensor reads it on the host",
        remedy="use tensor operations (torch.where, torch.maximum, torch.sqrt, a mask) or log the tensor itself",
        reads=True,
        blocks=True,
    ),
    Code(
        name="library-host-read",
        title="a library call reads a device tensor on the host",
        remedy="use a call or an option that stays on the device, or move the call out of the step",
        reads=True,
        blocks=True,
    ),
    Code(
        name="kernel-host-read",
        title="this operation waits for the device inside its implementation",
        remedy="use an operation that does not check or size its result on the host, or move it out of the step",
        reads=True,
        blocks=True,
        fixable=False,
    ),
    Code(
        name="copy-to-host",
        title="a device tensor is copied to the host and the host waits for it",
        remedy="keep the tensor on the device; what has to be seen goes through self.log",
        reads=True,
        blocks=True,
    ),
    Code(
        name="device-synchronize",
        title="the step waits for the device explicitly",
        remedy="remove the call; order work between streams with events",
        reads=True,
        blocks=True,
    ),
    # ---- copies and host tensors
    Code(
        name="copy-to-device",
        title="the step copies host memory to the device",
        remedy="create it on the device (torch.full(..., device=...)), register a buffer, or put it in the batch",
        reads=True,
        blocks=True,
    ),
    Code(
        name="async-copy-to-device",
        title="the step enqueues a copy from pinned host memory; a capture keeps the host address",
        remedy="put the tensor in the batch, or register a buffer and fill it before the step",
        blocks=True,
    ),
    Code(
        name="cpu-tensor",
        title="a CPU tensor takes part in device work",
        remedy="create it with device=, or register it as a buffer so that it moves with the module",
        blocks=True,
    ),
    Code(
        name="cpu-scalar",
        title="a 0-D CPU tensor is an argument of device work; a capture bakes its value",
        remedy="write a Python number if it is constant; otherwise make it a buffer",
        severity="note",
    ),
    Code(
        name="device-less-tensor",
        title="the step creates a tensor without device=, so it lands on the CPU",
        remedy="pass device=, or use x.new_zeros(...) / torch.zeros_like(x)",
        severity="warning",
    ),
    Code(
        name="dtype-less-tensor",
        title="the step creates a tensor whose dtype follows the Python value or the process default",
        remedy="pass dtype=",
        severity="note",
    ),
    # ---- shapes and control flow
    Code(
        name="data-dependent-shape",
        title="the shape of a result depends on the values of a tensor",
        remedy="keep the shape fixed: mask with torch.where or multiply by the mask, use topk or a fixed size",
        reads=True,
        blocks=True,
    ),
    Code(
        name="python-branch",
        title="two steps with the same input shapes ran different operations",
        remedy="make the choice on the device (torch.where), or outside the step",
        blocks=True,
    ),
    # ---- values baked into a capture
    Code(
        name="baked-value",
        title="a Python number that changes from step to step is an argument of device work",
        remedy="hold it in a 0-D buffer that is filled in place",
        blocks=True,
    ),
    Code(
        name="step-counter",
        title="the step uses batch_idx or global_step as a number, which a capture freezes; comparisons are fine",
        remedy="use self.trainer.scalars.global_step, a 0-D tensor, or decide in on_train_batch_start/end",
        blocks=True,
    ),
    Code(
        name="epoch-counter",
        title="the step looks at current_epoch; a capture has to be repeated each epoch",
        remedy="set what depends on the epoch in on_train_epoch_start",
        severity="note",
    ),
    Code(
        name="logged-number",
        title="self.log is given a Python number, which a replay repeats",
        remedy="nothing, where it is constant; otherwise log a tensor, or log it in a hook around the step",
        severity="note",
    ),
    Code(
        name="host-random",
        title="the step draws random numbers on the host; a capture draws them once",
        remedy="draw on the device: torch.rand(..., device=...), x.bernoulli(), torch.randint(..., device=...)",
        blocks=True,
    ),
    Code(
        name="host-clock",
        title="the step reads the clock; a capture reads it once",
        remedy="measure in on_train_batch_start/end, or with a profiler",
        severity="warning",
        blocks=True,
    ),
    Code(
        name="side-effect",
        title="the step prints; a replay does not",
        remedy="print in on_train_batch_end",
        severity="warning",
        blocks=True,
    ),
    # ---- state
    Code(
        name="python-state",
        title="the step changes Python state; a replay does not",
        remedy="keep the state in a buffer that is changed in place, or change it in on_train_batch_end",
        blocks=True,
    ),
    Code(
        name="rebound-tensor",
        title="the step binds an attribute to a new tensor, which costs a copy back or prevents a replay",
        remedy="write into the tensor: self.x.copy_(new), self.x.mul_(a).add_(b)",
        blocks=True,
    ),
    Code(
        name="lr-replaced",
        title="the step assigns a param_group option; a capture keeps the old one",
        remedy="use a learning-rate scheduler, or fill a tensor lr in place",
        blocks=True,
    ),
    Code(
        name="kept-graph",
        title="tensors of earlier steps stay alive together with their autograd graph: memory grows",
        remedy="keep loss.detach(), or a running sum in a buffer",
        blocks=True,
    ),
    Code(
        name="kept-tensor",
        title="tensors of earlier steps stay alive: memory grows, and a replay overwrites them",
        remedy="accumulate into a buffer in place, or log the value",
        blocks=True,
    ),
    Code(
        name="metric-list-state",
        title="a torchmetrics metric keeps every batch in a list, which a capture cannot grow",
        remedy="use the binned form of the metric (thresholds=...), or update it in on_train_batch_end",
        blocks=True,
    ),
    Code(
        name="churn",
        title="one line creates many small tensors each step",
        remedy="create one tensor and index or broadcast it",
        severity="warning",
    ),
    # ---- what a CUDA graph refuses
    Code(
        name="graph-refused",
        title="a CUDA graph refuses this call while it is captured",
        remedy="move the call out of the step",
        blocks=True,
        fixable=False,
    ),
    Code(
        name="rng-state-in-step",
        title="the step saves or restores the device's random state, which is not possible during capture",
        remedy="activation checkpointing: pass preserve_rng_state=False, or leave dropout out of the region",
        blocks=True,
    ),
    Code(
        name="optimizer-not-capturable",
        title="this optimizer decides on the host, so it steps eagerly after the captured part of the step",
        remedy="use zdtrain.optim.SimpleAdam or another optimizer that computes with tensors",
        severity="warning",
    ),
    Code(
        name="optimizer-outside",
        title="this optimizer steps eagerly, behind the captured part of the step",
        remedy="use zdtrain.optim.SimpleAdam to have its step captured, too",
        severity="note",
    ),
    Code(
        name="optimizer-by-hand",
        title="the step optimizes by hand with an optimizer whose step can't be captured, so nothing of it is",
        remedy="use zdtrain.optim.SimpleAdam",
        blocks=True,
    ),
    Code(
        name="scheduler-by-hand",
        title="the step moves a learning-rate scheduler on; a replay does not",
        remedy="return it from configure_optimizers, or step it in a hook around the step",
        blocks=True,
    ),
    Code(
        name="loss-shape",
        title="the loss is not a scalar",
        remedy="reduce it: loss.mean() or loss.sum(); a loss of shape [1] needs loss.squeeze()",
        blocks=True,
    ),
    # ---- module audit
    Code(
        name="wrong-device",
        title="a parameter or buffer is on the CPU although the module was moved to the device",
        remedy="register it before training starts, or create it with device=self.device",
        blocks=True,
    ),
    Code(
        name="plain-tensor",
        title="a plain tensor attribute does not move with the module and is not in its checkpoint",
        remedy="self.register_buffer(name, tensor), or nn.Parameter if it is trained",
    ),
    Code(
        name="hidden-submodule",
        title="a module inside a Python container is not registered: not moved, not trained, not saved",
        remedy="use nn.ModuleList or nn.ModuleDict",
        blocks=True,
    ),
    Code(
        name="hidden-parameter",
        title="a parameter inside a Python container is not registered: not moved, not trained, not saved",
        remedy="use nn.ParameterList or nn.ParameterDict",
        blocks=True,
    ),
    Code(
        name="unused-parameter",
        title="a trainable parameter got no gradient in any step",
        remedy="use it, freeze it with requires_grad_(False), or remove it",
        severity="warning",
    ),
    Code(
        name="zero-gradient",
        title="the gradient of a parameter was exactly zero in every step",
        remedy="look for a detach(), a multiplication by zero or a saturated function before it",
        severity="warning",
    ),
    Code(
        name="nonfinite-gradient",
        title="the gradient of a parameter is NaN or infinite",
        remedy="look for a division by zero, log(0), sqrt(0) or an overflow before it",
    ),
    Code(
        name="not-in-optimizer",
        title="a trainable parameter is in no optimizer",
        remedy="add it to an optimizer, or freeze it with requires_grad_(False)",
        severity="warning",
    ),
    Code(
        name="log-outside-hook",
        title="self.log is called where Lightning does not allow it",
        remedy="log in a *_step, *_epoch_end or batch hook",
        blocks=True,
    ),
    Code(
        name="step-raised",
        title="the step raised an exception",
        remedy="fix the exception first; what ran before it is reported",
        blocks=True,
        fixable=False,
    ),
    Code(
        name="simulation-disagrees",
        title="the simulated and the real device disagree here",
        remedy="trust the hardware, and report the operation so that the table of kernels can learn it",
        severity="warning",
    ),
)

CODES: dict[str, Code] = {code.name: code for code in _ALL}
"""Every code by name."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found at one place."""

    code: str
    """A name in `CODES`."""
    message: str
    """What was found, with the names involved."""
    remedy: str
    """What to write instead."""
    severity: Severity
    """``error``, ``warning`` or ``note``."""
    file: str | None = None
    """The user's file, where one is responsible."""
    line: int | None = None
    """Line in `file`, counted from 1."""
    function: str | None = None
    """Function around `line`."""
    count: float = 1.0
    """Occurrences per step; 1.0 for what is not counted."""
    stage: str = "train"
    """``train``, ``validation`` or ``module``."""
    hook: str = ""
    """The Lightning hook that ran, e.g. ``training_step``."""
    in_step: bool = True
    """False in hooks that run around the captured step (``on_train_batch_start`` and the like)."""
    library: str | None = None
    """The library function that did it, where the user's line only called it."""

    @property
    def blocks(self) -> bool:
        """Whether it stands in the way of a capture."""
        kind = CODES[self.code]
        return kind.blocks and self.in_step and SEVERITIES.index(self.severity) <= SEVERITIES.index(kind.severity)

    @property
    def reads(self) -> bool:
        """Whether the host waits for the device here."""
        return CODES[self.code].reads and self.severity != "note"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def make_finding(code: str, message: str, **fields: Any) -> Finding:
    """A finding with the severity and the remedy of its code, unless given."""
    kind = CODES[code]
    fields.setdefault("severity", kind.severity)
    fields.setdefault("remedy", kind.remedy)
    return Finding(code=code, message=message, **fields)
