"""The same step on a real GPU, to see where simulation and hardware disagree.

This module has not been run on hardware yet, only against a simulated GPU; everything that needs a GPU is in here.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from zdtrain.check.driver import leaving_no_trace, make_trainer, split_callbacks
from zdtrain.check.findings import Finding, make_finding
from zdtrain.check.report import CheckReport
from zdtrain.device import runtime_for
from zdtrain.quiet import quiet
from zdtrain.source.location import Location, locate

Place = tuple[str, int]


class WaitProbe(TorchDispatchMode):
    """Counts, by line of the user, how often the host waited for the device.

    `torch.cuda`'s trace callbacks report every wait for a stream, an event or the device, also those that
    `torch.cuda.set_sync_debug_mode` does not see.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[tuple[Location, str]] = Counter()
        """Waits by place and operation, over all steps."""
        self.num_steps = 0
        self.is_armed = False
        self._running = threading.local()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = getattr(self._running, "name", "")
        self._running.name = str(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._running.name = before

    def hit(self) -> None:
        """Count one wait at the line that is running."""
        if self.is_armed:
            location, _ = locate(None, torch._C._current_autograd_node())
            self.waits[location, getattr(self._running, "name", "")] += 1


_listening: list[WaitProbe] = []
_is_registered = False


def _hit(*_: Any) -> None:
    for probe in _listening:
        probe.hit()


def _register_once() -> None:
    """Torch's trace callbacks cannot be removed again: register one, which asks who is listening."""
    global _is_registered
    if not _is_registered:
        from torch.cuda import _gpu_trace

        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_stream_synchronization(_hit)
        _gpu_trace.register_callback_for_event_synchronization(_hit)
        _gpu_trace.register_callback_for_device_synchronization(_hit)
        _is_registered = True


@contextlib.contextmanager
def probing() -> Iterator[WaitProbe]:
    """Count waits inside, on the lines of the forward where a backward waits."""
    _register_once()
    probe = WaitProbe()
    _listening.append(probe)
    try:
        with torch.autograd.detect_anomaly(check_nan=False), probe:
            yield probe
    finally:
        _listening.remove(probe)


class _Arm(Callback):
    """Lets the probe count from the second step on, between batch start and batch end."""

    def __init__(self, probe: WaitProbe) -> None:
        self.probe = probe

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.probe.is_armed = batch_idx > 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.probe.num_steps += self.probe.is_armed
        self.probe.is_armed = False


class _LastBatch(Callback):
    """Keeps a batch that is on the GPU."""

    batch: Any = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batch = batch


def measure(
    module: LightningModule, datamodule: LightningDataModule | None, options: Mapping[str, Any], num_steps: int
) -> tuple[WaitProbe, Any]:
    """Train a few steps on the GPU; returns the waits, and a batch that is on the GPU."""
    last = _LastBatch()
    callbacks, _ = split_callbacks(options)
    with quiet(), leaving_no_trace(), probing() as probe:
        make_trainer(options, [_Arm(probe), *callbacks, last], num_steps, 0).fit(module, datamodule=datamodule)
    return probe, last.batch


def disagreements(simulated: list[Finding], waits: Counter[tuple[Location, str]], num_steps: int) -> list[Finding]:
    """Findings for the lines on which only one of the two saw the host wait.

    Args:
        simulated: what the shadow device found in the training steps.
        waits: what the GPU reported, over all steps.
        num_steps: how many steps those were.
    """
    predicted = {(f.file, f.line) for f in simulated if f.reads and f.stage == "train" and f.file and f.line}
    seen: dict[Place, Counter[str]] = {}
    for (location, operation), count in waits.items():
        if location.is_user:
            seen.setdefault((location.file, location.line), Counter())[operation or "a call of its own"] += count
    unforeseen = [
        make_finding(
            "simulation-disagrees",
            f"the GPU made the host wait here, which the simulation did not see: {', '.join(sorted(operations))}",
            file=file,
            line=line,
            count=operations.total() / max(1, num_steps),
        )
        for (file, line), operations in sorted(seen.items())
        if (file, line) not in predicted
    ]
    unconfirmed = [
        make_finding(
            "simulation-disagrees",
            "the simulation expects the host to wait here, and the GPU did not make it wait",
            file=file,
            line=line,
            severity="note",
        )
        for file, line in sorted(place for place in predicted if place not in seen)
    ]
    return unforeseen + unconfirmed


def has_gpu() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def gpu_name() -> str:
    """The name of this machine's GPU."""
    return torch.cuda.get_device_name()


def compare_with_gpu(
    module: LightningModule,
    datamodule: LightningDataModule | None,
    simulated: CheckReport,
    trainer_options: Mapping[str, Any],
    num_steps: int,
) -> list[Finding]:
    """Run the steps on the GPU, try a capture, and report what the simulation did not foresee.

    Args:
        module: a fresh copy of what was simulated; changed by the steps.
        datamodule: where batches come from; None if the module has loaders of its own.
        simulated: the report of the shadow device.
        trainer_options: options for Lightning's Trainer.
        num_steps: training steps to run.
    """
    probe, batch = measure(module, datamodule, trainer_options, num_steps)
    found = disagreements(list(simulated.findings), probe.waits, probe.num_steps)
    if module.automatic_optimization and batch is not None:
        error = try_capture(module.to("cuda"), batch)
        if (error is None) != (simulated.verdict == "capturable"):
            outcome = f"the GPU refused a trial capture: {error}" if error else "a trial capture on the GPU succeeded"
            severity = "warning" if error else "note"
            message = f"{outcome}; the simulation says {simulated.verdict}"
            found.append(make_finding("simulation-disagrees", message, severity=severity))
    return found


def try_capture(module: LightningModule, batch: Any) -> str | None:
    """Capture forward and backward of one training step in a CUDA graph; returns the error, if any.

    Args:
        module: a module with automatic optimization, on the GPU, attached to no trainer.
        batch: a batch on the GPU.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.__dict__["log"] = _log_nothing  # outside a run Lightning refuses to log

    def step() -> None:
        result = module.training_step(batch, 0)
        loss: Any = result["loss"] if isinstance(result, dict) else result
        torch.autograd.backward(loss, inputs=parameters)

    graph = runtime_for(torch.device("cuda")).graph()  # which puts right what a refused capture leaves behind
    try:
        for _ in range(3):
            step()
        with graph.capture():
            step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        del module.__dict__["log"]
    return None


def _log_nothing(*_args: Any, **_options: Any) -> None: ...
