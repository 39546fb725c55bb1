"""The ladder from a loop that reads its loss every step to a captured step, on an embedding-sum classifier.

Vocabulary 10 000, width 768, batches of 32 x 128 tokens that lie on the device; AdamW throughout. The rungs:

    baseline        loss and accuracy read with .item() every step, a threshold compared on the host
    no sync         the same numbers summed on the device and read once at the end
    tensor scalars  learning rate, threshold and running mean are 0-D tensors, written in place every step
    full stack      zdtrain.Trainer(capture="graph"); "compiled" with capture="compile"

beside them stock Lightning, zdtrain without capture, a raw loop that logs nothing, the same captured by hand ("raw
graph"), and nothing but `graph.replay()` ("bare replay"). Contenders take turns, in another order in each round;
speed-ups are ratios within a round, figures are medians. The clock runs from one synchronisation to another, behind a
warm-up in which steps are captured.

Utilisation is busy time over wall time. Busy time is measured by events around a few steps that wait behind a sleeping
device, so that the host is ahead of it and no gap is counted; a step that reads is charged the busy time of its rung
that does not. Fragmentation is reserved over allocated memory.

    python -m benchmarks.gpu_ladder                      # needs a GPU; writes benchmarks/results/gpu_ladder.json
    python -m benchmarks.gpu_ladder --device cpu --steps 20 --rounds 1 --width 32 --out ladder.json

Not yet run on hardware; with --device cpu it is tested.
"""

import argparse
import gc
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import zdtrain
from benchmarks.facts import save
from zdtrain.device import Runtime, UnsupportedError, runtime_for
from zdtrain.optim import SimpleAdam
from zdtrain.quiet import quiet
from zdtrain.scalars import DeviceScalars

Batch = tuple[Tensor, Tensor]
WARMUP_STEPS = 32  # a captured step is watched, recorded and compared in them
PROBED_STEPS = 8  # the last of the warm-up
SLEEP_CYCLES = 100_000_000  # about 50 ms, more than the host needs to launch the probed steps
CLASSES = 8
THRESHOLD = 10.0
OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}
GOALS = {"full stack x baseline": 3.0, "full stack / bare replay": 1.03}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The experiment."""

    vocabulary: int = 10_000
    width: int = 768
    batch: int = 32
    tokens: int = 128


class Device:
    """What a measurement asks of the device; the host answers for itself."""

    def __init__(self, name: str) -> None:
        self.runtime: Runtime = runtime_for(torch.device(name))
        self.device = self.runtime.device
        self.is_cuda = self.device.type == "cuda"
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.is_cuda else []

    def start_over(self) -> None:
        """Give memory back, and forget its peak."""
        self.runtime.release_pool()
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def begin_probe(self) -> None:
        """Let the device sleep, and mark the end of that."""
        if self.is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
            self._marks[0].record()

    def end_probe(self) -> None:
        """Mark the end of the probed steps."""
        if self.is_cuda:
            self._marks[1].record()

    def busy_ms(self) -> float | None:
        """Return device time between the marks, which are done; None on the host."""
        return self._marks[0].elapsed_time(self._marks[1]) if self.is_cuda else None

    def memory(self) -> dict[str, float] | None:
        """Return what the allocator holds."""
        stats = self.runtime.memory()
        if stats is None:
            return None
        return {**asdict(stats), "fragmentation": stats.reserved_bytes / max(1, stats.allocated_bytes)}


class Window:
    """A loader that costs nothing and holds the clock: batches on the device, cycled, the first ones not timed."""

    def __init__(self, device: Device, batches: Sequence[Batch], steps: int) -> None:
        self._device = device
        self._batches = batches
        self.steps = steps
        self.seconds = 0.0
        self.busy_ms_per_step: float | None = None
        self.memory: dict[str, float] | None = None

    def __len__(self) -> int:
        return WARMUP_STEPS + self.steps

    def __iter__(self) -> Iterator[Batch]:
        device = self._device
        for i in range(len(self)):
            if i == WARMUP_STEPS - PROBED_STEPS:
                device.begin_probe()
            elif i == WARMUP_STEPS:
                device.end_probe()
                device.runtime.synchronize()
                self._start = time.perf_counter()
            yield self._batches[i % len(self._batches)]

    def stop(self) -> None:
        """Stop the clock once the device is done."""
        self._device.runtime.synchronize()
        self.seconds = time.perf_counter() - self._start
        busy = self._device.busy_ms()
        self.busy_ms_per_step = None if busy is None else busy / PROBED_STEPS
        self.memory = self._device.memory()


class Net(nn.Module):
    """logits = W · Σ_t E[token_t] + b."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).sum(dim=1))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


class Classifier(pl.LightningModule):
    def __init__(self, size: Size, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net = Net(size)
        self.optimizer = optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, labels = batch
        logits = self.net(tokens)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", accuracy(logits, labels), on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **OPTIONS)


def baseline(window: Window, net: nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    losses, accuracies, alarms = [], [], 0
    for tokens, labels in window:
        logits = net(tokens)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        accuracies.append(accuracy(logits, labels).item())
        alarms += losses[-1] > THRESHOLD
    window.stop()


def no_sync(window: Window, net: nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)
    losses, accuracies, alarms = torch.zeros(3, device=next(net.parameters()).device).unbind()
    for tokens, labels in window:
        logits = net(tokens)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += loss.detach()
        accuracies += accuracy(logits, labels)
        alarms += loss.detach() > THRESHOLD
    window.stop()


def tensor_scalars(window: Window, net: nn.Module) -> None:
    optimizer = SimpleAdam(net.parameters(), **OPTIONS)
    scalars = DeviceScalars({"threshold": THRESHOLD, "mean": 0.0, "accuracy": 0.0, "alarms": 0.0})
    scalars.to(next(net.parameters()).device)
    for i, (tokens, labels) in enumerate(window):
        logits = net(tokens)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"] / (1 + i / 1000)
        optimizer.step()
        scalars.mean.lerp_(loss.detach(), 0.01)
        scalars.accuracy.lerp_(accuracy(logits, labels), 0.01)
        scalars.alarms.add_(loss.detach() > scalars.threshold)
    window.stop()


def raw(window: Window, net: nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), fused=True, **OPTIONS)
    for tokens, labels in window:
        optimizer.zero_grad()
        F.cross_entropy(net(tokens), labels).backward()
        optimizer.step()
    window.stop()


def raw_graph(window: Window, net: nn.Module, *, runtime: Runtime, copies: bool) -> None:
    optimizer = SimpleAdam(net.parameters(), **OPTIONS)
    tokens, labels = (tensor.clone() for tensor in window._batches[0])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(tokens), labels).backward()
        optimizer.step()

    for _ in range(3):
        step()
    graph = runtime.graph()
    optimizer.zero_grad()
    with graph.capture():
        step()
    for batch in window:
        if copies:
            tokens.copy_(batch[0], non_blocking=True)
            labels.copy_(batch[1], non_blocking=True)
        graph.replay()
    window.stop()


class Stopwatch(pl.Callback):
    """Stops the clock while programs and memory are still there."""

    def __init__(self, window: Window) -> None:
        self.window = window

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.window.stop()


def fit(
    window: Window,
    size: Size,
    device: Device,
    trainer_class: type[pl.Trainer],
    optimizer: Callable[..., torch.optim.Optimizer],
    **options: Any,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            max_epochs=1,
            accelerator="gpu" if device.is_cuda else "cpu",
            devices=1,
            default_root_dir=folder,
            logger=CSVLogger(folder),
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[Stopwatch(window)],
            **options,
        )
        trainer.fit(Classifier(size, optimizer), window)
    return {} if trainer_class is pl.Trainer else capture_status(trainer)


def capture_status(trainer: Any) -> dict[str, Any]:
    report = trainer.capture_report
    return {
        "capture": report.capture,
        "steps_replayed": report.steps_replayed,
        "steps_eager": report.steps_eager,
        "programs": [asdict(program) for program in report.programs],
        "fallbacks": [str(reason) for reason in report.fallbacks],
    }


def contenders(size: Size, device: Device) -> dict[str, Callable[[Window], dict[str, Any]]]:
    """Return who is measured, by name."""
    on_device = nullcontext if not device.is_cuda else partial(torch.cuda.device, device.device)

    def loop(run: Callable[[Window, nn.Module], None]) -> Callable[[Window], dict[str, Any]]:
        def measured(window: Window) -> dict[str, Any]:
            with on_device():
                run(window, Net(size).to(device.device))
            return {}

        return measured

    trained = partial(fit, size=size, device=device)
    return {
        "baseline": loop(baseline),
        "no sync": loop(no_sync),
        "tensor scalars": loop(tensor_scalars),
        "full stack": partial(trained, trainer_class=zdtrain.Trainer, optimizer=SimpleAdam, capture="graph"),
        "full stack compiled": partial(trained, trainer_class=zdtrain.Trainer, optimizer=SimpleAdam, capture="compile"),
        "lightning": partial(trained, trainer_class=pl.Trainer, optimizer=torch.optim.AdamW),
        "zdtrain eager": partial(trained, trainer_class=zdtrain.Trainer, optimizer=torch.optim.AdamW, capture="off"),
        "raw": loop(raw),
        "raw graph": loop(partial(raw_graph, runtime=device.runtime, copies=True)),
        "bare replay": loop(partial(raw_graph, runtime=device.runtime, copies=False)),
    }


def random_batches(size: Size, device: Device, count: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, size.vocabulary, (size.batch, size.tokens), generator=generator).to(device.device),
            torch.randint(0, CLASSES, (size.batch,), generator=generator).to(device.device),
        )
        for _ in range(count)
    ]


def measure(size: Size, device: Device, names: Sequence[str], *, rounds: int, steps: int) -> dict[str, Any]:
    """Let the contenders take turns."""
    runs = {name: run for name, run in contenders(size, device).items() if name in names}
    batches = random_batches(size, device)
    skipped: dict[str, str] = {}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    last: dict[str, tuple[Window, dict[str, Any]]] = {}
    order = random.Random(0)
    for _ in range(rounds + 1):  # the first one fills caches and is not counted
        for name in order.sample([*runs], len(runs)):
            if name in skipped:
                continue
            device.start_over()
            window = Window(device, batches, steps)
            try:
                status = runs[name](window)
            except UnsupportedError as error:
                skipped[name] = str(error)
                continue
            seconds[name].append(window.seconds / steps)
            last[name] = window, status
    results = {
        name: summary(seconds[name][1:], seconds.get("baseline", [])[1:], *last[name]) for name in runs if name in last
    }
    for name, busy_from in {"baseline": "no sync", "lightning": "zdtrain eager"}.items():
        if name in results and busy_from in results:
            results[name]["busy_ms_per_step"] = results[busy_from]["busy_ms_per_step"]
    for result in results.values():
        busy = result["busy_ms_per_step"]
        result["utilisation"] = None if busy is None else busy / result["ms_per_step"]
    return {"rungs": results, "skipped": skipped, "goals": goals(seconds)}


def summary(seconds: list[float], base: list[float], window: Window, status: dict[str, Any]) -> dict[str, Any]:
    ratios = [b / s for b, s in zip(base, seconds, strict=False)]
    middle = statistics.median(seconds)
    return {
        "steps_per_second": 1 / middle,
        "ms_per_step": middle * 1e3,
        "speed_up": statistics.median(ratios) if ratios else None,
        "speed_up_range": [min(ratios), max(ratios)] if ratios else None,
        "busy_ms_per_step": window.busy_ms_per_step,
        "memory": window.memory,
        **status,
    }


def goals(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the two ratios that the project has set itself, and whether they are reached."""

    def ratio(over: str, under: str) -> float | None:
        pairs = zip(seconds.get(over, [])[1:], seconds.get(under, [])[1:], strict=False)
        values = [a / b for a, b in pairs]
        return statistics.median(values) if values else None

    gain = ratio("baseline", "full stack")
    overhead = ratio("full stack", "bare replay")
    return {
        "full stack x baseline": {
            "measured": gain,
            "goal": GOALS["full stack x baseline"],
            "reached": gain is not None and gain >= GOALS["full stack x baseline"],
        },
        "full stack / bare replay": {
            "measured": overhead,
            "goal": GOALS["full stack / bare replay"],
            "reached": overhead is not None and overhead <= GOALS["full stack / bare replay"],
        },
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"{'rung':20} {'steps/s':>9} {'speed-up':>9} {'busy':>6} {'reserved/allocated':>19} {'peak MiB':>9}  captured"
    )
    for name, rung in result["rungs"].items():
        memory = rung["memory"]
        busy = "" if rung["utilisation"] is None else f"{rung['utilisation']:.0%}"
        fragments = "" if memory is None else f"{memory['fragmentation']:.2f}"
        peak = "" if memory is None else f"{memory['peak_allocated_bytes'] / 2**20:.0f}"
        programs = ", ".join(program["verification"] for program in rung.get("programs", []))
        gain = "" if rung["speed_up"] is None else f"{rung['speed_up']:.2f}"
        print(f"{name:20} {rung['steps_per_second']:9.1f} {gain:>9} {busy:>6} {fragments:>19} {peak:>9}  {programs}")
        for reason in rung.get("fallbacks", []):
            print(f"  - {reason}")
    for name, reason in result["skipped"].items():
        print(f"{name:20} skipped: {reason}")
    for name, goal in result["goals"].items():
        print(f"{name}: {goal['measured']} (goal {goal['goal']}, {'reached' if goal['reached'] else 'not reached'})")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500)
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", help="measure these rungs (default: all)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_ladder.json"))
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch {torch.__version__} finds no GPU; --device cpu tries it out")
    size = Size(**{name: getattr(options, name) for name in asdict(Size())})
    device = Device(options.device)
    names = options.only or [*contenders(size, device)]
    if unknown := set(names) - {*contenders(size, device)}:
        parser.error(f"--only: no rung is called {', '.join(sorted(unknown))}; they are {[*contenders(size, device)]}")
    with quiet():
        measured = measure(size, device, names, rounds=options.rounds, steps=options.steps)
    result = {
        "device": torch.cuda.get_device_name(device.device) if device.is_cuda else platform.processor() or "cpu",
        "cuda": torch.version.cuda,
        "rounds": options.rounds,
        "steps": options.steps,
        "size": asdict(size),
        **measured,
    }
    show(result)
    save(options.out, result)
    return result


if __name__ == "__main__":
    main()
