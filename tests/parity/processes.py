"""What two processes do for `test_processes.py`: train with stock Lightning's Trainer and with zdtrain's, and count."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zdtrain
from tests.monitor import processes as watched
from tests.parity.harness import Net, Outcome, differences, fit, loader, run

PROCESSES = 2
DDP = {"devices": PROCESSES, "strategy": "ddp", "log_every_n_steps": 1}
FLAGS = {"on_step": True, "on_epoch": True, "sync_dist": True}


class Base(Net):
    """Logs in and outside of steps; its 22 samples give each process 11."""

    samples = 22

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def write(self, loss: Tensor, batch_idx: int) -> None:
        self.log("loss", loss, prog_bar=True, **FLAGS)
        self.log("local", loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.write(loss, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.write(self.loss(batch) * (1 + dataloader_idx), batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.write(self.loss(batch), batch_idx)

    def test_dataloader(self) -> Any:
        return loader(9, 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", batch_idx * 1.5 + self.global_rank, **FLAGS)

    def on_train_epoch_end(self) -> None:
        self.log("z_epoch_end", self.global_rank + 0.1, sync_dist=True)
        self.log("epoch_end", self.global_rank + 0.3, sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch_end", self.global_rank + 0.7, sync_dist=True, reduce_fx="max")


class Ways(Base):
    """All ways of logging over processes."""

    def write(self, loss: Tensor, batch_idx: int) -> None:
        rank = self.global_rank
        uneven = batch_idx + 3 * rank + 1
        for reduce_fx in ("mean", "sum", "max", "min"):
            self.log(reduce_fx, loss * (rank + 1), reduce_fx=reduce_fx, **FLAGS)
            self.log(f"{reduce_fx}_double", loss.double() / 3, reduce_fx=reduce_fx, **FLAGS)
            self.log(f"{reduce_fx}_number", 0.1 * batch_idx, reduce_fx=reduce_fx, sync_dist=True)
        self.log("function", loss, reduce_fx=torch.sum, **FLAGS)
        self.log("whole", torch.tensor(uneven), **FLAGS)
        self.log("weighted", loss, batch_size=uneven, **FLAGS)
        self.log("tensor_weight", loss, batch_size=torch.tensor(uneven), **FLAGS)
        self.log("large_weight", loss.double(), batch_size=2**24 + uneven, **FLAGS)
        self.log("step", loss, on_step=True, on_epoch=False, sync_dist=True, prog_bar=True)
        self.log("step_sum", loss, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.log("local", loss + rank, on_step=True, on_epoch=True)
        self.log("first", loss, rank_zero_only=True, **FLAGS)
        self.log("nan", loss * float("nan"), **FLAGS)
        self.log("one_nan", loss * (float("nan") if rank else 1.0), reduce_fx="max", **FLAGS)
        self.log("graph", loss, enable_graph=True, **FLAGS)
        self.log("grouped", loss, sync_dist_group=other_group(), **FLAGS)
        self.log("grouped_max", loss, sync_dist_group=other_group(), reduce_fx="max", **FLAGS)
        self.log("of_one", loss + rank, sync_dist_group=own_group(), **FLAGS)
        self.log("twice", loss, **FLAGS)
        self.log("twice", 2 * loss, **FLAGS)
        self.log("read_back", self.trainer.callback_metrics["twice"] + 1, **FLAGS)
        self.mean(loss.detach())
        self.log("object", self.mean, **FLAGS)


class Loaders(Base):
    def val_dataloader(self) -> Any:
        return [loader(10, 4), loader(7, 2)]


class Unused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


class ByHand(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.log("before", loss, prog_bar=True, **FLAGS)
        self.manual_backward(loss)
        optimizer.step()
        self.log("after", loss + 1, **FLAGS)
        return loss


class Scheduled(Unused):
    """Has unused parameters and a schedule by steps; its 7 batches make windows of 3 and one of 1."""

    samples = 54

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "loss_epoch"},
        ]
        return [optimizer], schedulers


class OneReturnsNone(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx == 1 else loss


class Closure(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Failing(Base):
    """Both processes fail in the second step, behind its log calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.log("late", loss, **FLAGS)
            raise ValueError("no")
        return loss


class Uneven(Base):
    """Each process has a loader of its own, and their last batches differ in size."""

    def train_dataloader(self) -> Any:
        return loader(10 + self.global_rank, 4)

    def val_dataloader(self) -> Any:
        return loader(9 + 2 * self.global_rank, 4)


_GROUPS: dict[str, Any] = {}


def other_group() -> Any:
    return _GROUPS["other"]


def own_group() -> Any:
    return _GROUPS[f"own{dist.get_rank()}"]


class OneReads(Callback):
    """Reads metrics in one process, as a progress bar does, and at other times than anything else."""

    def _read(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            dict(trainer.callback_metrics)

    on_train_batch_start = on_train_batch_end = on_before_backward = on_train_epoch_end = _read
    on_validation_batch_end = on_validation_epoch_end = on_before_zero_grad = _read


def fit_and_test(trainer: Any, model: Any) -> Any:
    trainer.fit(model)
    return trainer.validate(model, verbose=False), trainer.test(model, verbose=False)


def fit_and_resume(trainer: Any, model: Any) -> None:
    trainer.fit(model)
    best = trainer.checkpoint_callback.best_model_path
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, ckpt_path=best)


def fit_and_count(trainer: Any, model: Any) -> Any:
    trainer.fit(model)
    return sorted(
        (name, len(times)) for name, times in trainer.profiler.recorded_durations.items() if "[Strategy]" in name
    )


class OnCluster(DDPStrategy):
    """Says where a process is in its own words, as Ray's strategy does, and leaves the step alone."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


COMPARED: dict[str, dict[str, Any]] = {
    "cluster": {"module": Base, "strategy": OnCluster},
    "ways": {"module": Ways, "callbacks": lambda: [OneReads()], "limit_train_batches": 2, "limit_val_batches": 1},
    "seen": {"module": Ways, "spy": True, "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1},
    "loaders": {"module": Loaders, "val_check_interval": 0.5, "spy": True},
    "stages": {"module": Base, "do": fit_and_test},
    "accumulated": {"module": Base, "accumulate_grad_batches": 3, "lightning_quirks": True},
    "unused": {"module": Unused, "strategy": "ddp_find_unused_parameters_true", "gradient_clip_val": 0.1},
    "by_hand": {"module": ByHand, "spy": True},
    "closure": {"module": Closure},
    "scheduled": {
        "module": Scheduled,
        "strategy": lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True),
        "accumulate_grad_batches": 3,
        "lightning_quirks": True,
        "gradient_clip_val": 0.1,
        "val_check_interval": 3,
        "do": fit_and_resume,
        "enable_checkpointing": True,
        "callbacks": lambda: [ModelCheckpoint(monitor="loss_step", save_top_k=-1, every_n_train_steps=1)],
    },
    "static": {"module": Base, "strategy": lambda: DDPStrategy(static_graph=True)},
    "profiled": {"module": Base, "do": fit_and_count, "profiler": "simple", "max_epochs": 1},
    "told": {"module": Base, "callbacks": lambda: [Told()], "error": "SIGTERMException"},
    "none": {"module": OneReturnsNone, "error": "Skipping the `training_step` by returning None"},
    "uneven": {"module": Uneven, "use_distributed_sampler": False, "spy": True},
    "resumed": {
        "module": Base,
        "do": fit_and_resume,
        "enable_checkpointing": True,
        "callbacks": lambda: [ModelCheckpoint(monitor="loss_epoch", save_top_k=2)],
    },
}


def compare(folder: Path, options: dict[str, Any]) -> list[str]:
    """Return where the Trainers differ in what they leave in this process."""
    options = dict(options)
    quirks, expected = options.pop("lightning_quirks", False), options.pop("error", None)
    fallbacks: list[str] = []

    def make_ours(**kwargs: Any) -> zdtrain.Trainer:
        trainer = zdtrain.Trainer(lightning_quirks=quirks, **kwargs)
        trainer.fit_loop.epoch_loop.fallbacks = fallbacks
        return trainer

    outcomes = [train(make, folder, **options) for make in (pl.Trainer, make_ours)]
    errors = [outcome.error or "" for outcome in outcomes]
    unexpected = [error for error in errors if error if expected is None or expected not in error]
    missing = [f"no error {expected!r}" for error in errors if expected and not error]
    return [*differences(*outcomes), *unexpected, *missing, *map(str, fallbacks)]


def train(make: Callable[..., pl.Trainer], folder: Path, module: Any, do: Any = fit, **options: Any) -> Outcome:
    """Train in a folder of both processes."""
    place = folder / "run"
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    dist.barrier()

    def do_and_wait(trainer: Any, model: Any) -> Any:
        try:
            return do(trainer, model)
        finally:
            dist.barrier()  # what is in the folder is looked at next, by both

    options = {**DDP, **options}
    if callable(options["strategy"]):
        options["strategy"] = options["strategy"]()
    outcome, _ = run(make, place, module, do=do_and_wait, **options)
    dist.barrier()
    return outcome


class Told(Callback):
    """Rank zero is told to end before the first batch of an epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            trainer._signal_connector.received_sigterm = True


class Averages(Callback):
    """Averages the weights of a run with stock Lightning."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step:
            self._take(module)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self._take(module)
        trainer.averaged = self.weights

    def _take(self, module: Any) -> None:
        for name, weight in module.named_parameters():
            self.weights[name].lerp_(weight.detach(), torch.tensor(1 - 0.9))


def averaged(folder: Path) -> list[str]:
    """Return where averaged weights differ from those of stock Lightning's weights."""
    found: list[dict[str, Tensor]] = []

    def fit_and_keep(trainer: Any, model: Any) -> None:
        trainer.fit(model)
        if isinstance(trainer, zdtrain.Trainer):
            state = trainer.ema.state_dict()
            found.append({name: state[name] for name, _ in model.named_parameters()})
        else:
            found.append(trainer.averaged)

    options = {"do": fit_and_keep, "accumulate_grad_batches": 2, "val_check_interval": 1}
    stock = train(pl.Trainer, folder, Base, callbacks=lambda: [Averages()], **options)
    ours = train(partial(zdtrain.Trainer, ema_decay=0.9, lightning_quirks=True), folder, Base, **options)
    return [*differences(*found), *(outcome.error for outcome in (stock, ours) if outcome.error)]


class Many(Base):
    """Logs 64 means and 3 of other kinds in each step."""

    samples = 16  # two steps for each process

    def write(self, loss: Tensor, batch_idx: int) -> None:
        flags = FLAGS if self.trainer.training else {"sync_dist": True}
        for i in range(64):
            self.log(f"mean{i}", loss / (i + 3), **flags)
        self.log("sum", loss, reduce_fx="sum", **flags)
        self.log("double", loss.double(), **flags)
        self.log("max", loss, reduce_fx="max", **flags)

    def val_dataloader(self) -> Any:
        return loader(16, 4)

    def _log_nothing(self, *_: Any) -> None:
        pass

    on_train_batch_end = on_train_epoch_end = on_validation_epoch_end = _log_nothing


class OtherOrder(Many):
    """The processes log their metrics in other orders."""

    def write(self, loss: Tensor, batch_idx: int) -> None:
        for name in ("a", "b") if self.global_rank else ("b", "a"):
            self.log(name, float(ord(name)), **FLAGS)


class OneLogs(Many):
    """One process logs a metric that the other does not."""

    def write(self, loss: Tensor, batch_idx: int) -> None:
        self.log("all", loss, **FLAGS)
        if self.global_rank == 0:
            self.log("one", loss, **FLAGS)


@contextmanager
def counted(calls: list[str], *names: str) -> Iterator[None]:
    """Note the collectives that the body calls from Python; DDP's own come from C++."""
    originals = {name: getattr(dist, name) for name in names}

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, noted(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class HostReads(TorchDispatchMode):
    """Notes operations by which the host learns a tensor's value."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._calls.append("read")
        return func(*args, **(kwargs or {}))


def collectives_and_reads(folder: Path) -> dict[str, list[str]]:
    """Return what two training steps, their epoch and a validation do together, and what the host reads there."""
    calls: dict[str, list[str]] = {"steps": [], "validation": [], "epoch": []}
    seen: list[str] = []
    reads = HostReads(seen)

    class Sections(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.clear()
            reads.__enter__()

        def on_before_backward(self, *_: Any) -> None:
            reads.__exit__(None, None, None)
            calls["steps"].extend(drained(seen))

        def on_validation_start(self, *_: Any) -> None:
            seen.clear()

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.val_loop.batch_progress.is_last_batch:
                reads.__enter__()

        def on_validation_epoch_end(self, *_: Any) -> None:
            reads.__exit__(None, None, None)
            calls["validation"].extend(drained(seen))

        def on_train_epoch_end(self, *_: Any) -> None:
            calls["epoch"].extend(drained(seen))

    with counted(seen, "all_reduce", "barrier"):
        error = train(zdtrain.Trainer, folder, Many, max_epochs=1, callbacks=lambda: [Sections()]).error
    assert error is None, error
    return calls


def reduced_metrics(outcome: Outcome) -> dict[str, float]:
    assert outcome.error == "ValueError: no"
    return {name: value.item() for name, value in outcome.metrics["callback_metrics"] if name != "local"}


def drained(seen: list[str]) -> list[str]:
    taken = list(seen)
    seen.clear()
    return taken


def check(rank: int, port: int, folder: Path) -> None:
    """Run everything in process `rank` and leave what was found in ``<rank>.json``."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=30))
    _GROUPS.update(other=dist.new_group([0, 1]), own0=dist.new_group([0]), own1=dist.new_group([1]))
    found: dict[str, Any] = {name: compare(folder, options) for name, options in COMPARED.items()}
    found["averaged"] = averaged(folder)
    found["watched"] = watched.check(folder)
    found["calls"] = collectives_and_reads(folder)
    in_order = train(zdtrain.Trainer, folder, OtherOrder)
    found["other order"] = {name: value.item() for name, value in in_order.metrics["callback_metrics"]}
    found["failed"] = [reduced_metrics(train(make, folder, Failing)) for make in (pl.Trainer, zdtrain.Trainer)]
    found["one logs"] = train(zdtrain.Trainer, folder, OneLogs).error
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
