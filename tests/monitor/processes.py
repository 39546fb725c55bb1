"""What two processes do with monitors: one of them sees a bad batch, and both do the same in the same step."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from zdtrain.monitors import NonFinite, Statistics, Threshold
from zdtrain.records import load_run

from .runs import Net, OneRowAtATime, differences, left_behind, loader, run

DDP: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
COUNTED = ("weights", "optimizer", "schedule", "updates", "epoch")
BATCHES = 30
Lag = dict[str, Any]


class OfRank(Net):
    """Sees other samples in each process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] + self.global_rank, *batch[1:]], batch_idx)


def late() -> Lag:
    """A device that answers late, and another host in each process."""
    rank = dist.get_rank()
    lag = {"lag": 4 + 10_000 * rank, "max_lag_steps": 6}
    return {**lag, "callbacks": [OneRowAtATime()]} if rank == 0 else lag


def bad(step: int, kind: str = "nan") -> Any:
    """Batches of which the second process has a bad one."""
    return loader(BATCHES, {step: kind} if dist.get_rank() else None)


def skipped(lag: Lag, optimizer: str, **options: Any) -> list[str]:
    without = run(OfRank(optimizer), loader(BATCHES, without=(11,)), **DDP)
    got = run(OfRank(optimizer), bad(11), nonfinite="skip", **DDP, **lag, **options)
    one, other = left_behind(got), left_behind(without)
    counts = [got.global_step, got.skipped_steps, len(got.ended)]
    found = differences({k: one[k] for k in COUNTED}, {k: other[k] for k in COUNTED})
    return found + ([] if counts == [BATCHES, 1, BATCHES] else [f"counts {counts}"])


def scheduled_late() -> list[str]:
    """Return where the processes differ when a scheduler on the host hears of a skipped step late."""
    got = run(OfRank("SGD momentum"), bad(11), nonfinite="skip", **DDP, **late())
    mine = {
        "rate": torch.tensor(got.optimizers[0].param_groups[0]["lr"]),
        **dict(got.lightning_module.named_parameters()),
    }
    of_zero = {name: tensor.detach().clone() for name, tensor in mine.items()}
    for tensor in of_zero.values():
        dist.broadcast(tensor, src=0)
    return differences(mine, of_zero) + ([] if got.skipped_steps == 1 else [f"skipped {got.skipped_steps}"])


def stopped(lag: Lag, optimizer: str, **options: Any) -> list[str]:
    ended = run(OfRank(optimizer), loader(BATCHES), max_steps=11, **DDP)
    got = run(OfRank(optimizer), bad(11), monitors=[NonFinite("loss", then="stop")], **DDP, **lag, **options)
    counts = torch.tensor([got.global_step, len(got.ended)])
    of_zero = counts.clone()
    dist.broadcast(of_zero, src=0)
    found = differences(left_behind(got), left_behind(ended))
    return found + ([] if counts[0] == 11 and counts.equal(of_zero) else [f"counts {counts} and {of_zero}"])


class OtherClock(Callback):
    """Lets a checkpoint by the clock be due after every batch, but by the first process's clock only."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_global_zero:
            trainer.checkpoint_callback._last_time_checked = time.monotonic() + 1000


def stopped_by_other_clocks(folder: Path) -> list[str]:
    checkpoints = ModelCheckpoint(folder / "timed", train_time_interval=timedelta(0))
    return stopped({}, "SGD", callbacks=[OtherClock(), checkpoints], enable_checkpointing=True)


class ClipsInOneStep(Callback):
    """Clips as the monitor is to clip."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 11:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01, foreach=True)


def clipped() -> list[str]:
    monitor = Threshold("train_loss", above=100.0, then="clip", clip_norm=0.01)
    got = run(OfRank(), bad(11, "large"), monitors=[monitor], **DDP)
    want = run(OfRank(), bad(11, "large"), callbacks=[ClipsInOneStep()], **DDP)
    plain = run(OfRank(), bad(11, "large"), **DDP)
    same = differences(left_behind(got)["weights"], left_behind(plain)["weights"]) == []
    return differences(left_behind(got)["weights"], left_behind(want)["weights"]) + (["nothing was clipped"] * same)


def accumulated() -> list[str]:
    options = {**DDP, "accumulate_grad_batches": 3}
    without = run(OfRank(), loader(BATCHES, without=(12, 13, 14)), **options)
    got = run(OfRank(), bad(13), nonfinite="skip", **options)
    one, other = left_behind(got), left_behind(without)
    return differences({k: one[k] for k in COUNTED}, {k: other[k] for k in COUNTED})


def saved(folder: Path) -> list[str]:
    """Return what is wrong with the checkpoints of a run that is stopped, and with its record."""
    heard: list[int] = []
    monitors = [
        NonFinite("loss", then="stop", find_module=True),
        Statistics("train_loss"),
        Threshold("first", above=-1e9, after_step=3, cooldown=100, then=lambda event: heard.append(event.step)),
    ]
    checkpoints = ModelCheckpoint(folder / "saved", every_n_train_steps=4, save_top_k=-1)
    options = {"callbacks": [checkpoints], "enable_checkpointing": True, "records": folder / "records"}
    trainer = run(OfRank(), bad(11), monitors=monitors, **DDP, **options)
    dist.barrier()
    codes = [reason.code for reason in trainer.fit_loop.epoch_loop.fallbacks]
    found = [] if codes == ["find-module"] else codes
    found += [] if heard == ([] if dist.get_rank() else [3]) else [f"called at {heard}"]
    names = sorted(path.name for path in (folder / "saved").glob("*.ckpt"))
    folders = [path.parent for path in (folder / "records").rglob("events.jsonl")]
    if names != ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"] or len(folders) != 1:
        return [*found, f"{names} {folders}"]
    record = load_run(folders[0])
    events = [(event["action"], event["step"]) for event in record.events if event["kind"] == "monitor"]
    steps = record.series("train_loss_step")[0]
    return found + (
        [] if ("stop", 11) in events and len(events) == 2 and steps == [*range(11)] else [f"{events} {steps}"]
    )


def resumed(folder: Path) -> list[str]:
    options = {**DDP, "nonfinite": "skip", "ema_decay": 0.9, "max_epochs": 2, "enable_checkpointing": True}
    whole = run(OfRank("AdamW"), bad(11), callbacks=[ModelCheckpoint(folder / "whole", save_top_k=-1)], **options)
    dist.barrier()
    path = folder / "whole" / f"epoch=0-step={BATCHES}.ckpt"
    again = run(OfRank("AdamW"), bad(11), ckpt_path=path, callbacks=[ModelCheckpoint(folder / "again")], **options)
    one, other = ({**left_behind(t), "ema": t.ema.state_dict(), "skipped": t.skipped_steps} for t in (whole, again))
    return differences(one, other) + ([] if other["skipped"] == 2 else [f"skipped {other['skipped']}"])


def by_hand() -> list[str]:
    class ByHand(OfRank):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    try:
        run(ByHand(), loader(2), nonfinite="skip", **DDP)
    except Exception as error:
        return [] if "needs steps on zdtrain's own loop" in str(error) else [str(error)]
    return ["no error"]


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "skip": lambda _: skipped({}, "AdamW"),
    "skip, the schedule on the host": lambda _: scheduled_late(),
    "skip, the schedule on a device": lambda _: skipped(late(), "SimpleAdam"),
    "stop": lambda _: stopped({}, "AdamW"),
    "stop, late": lambda _: stopped(late(), "SimpleAdam"),
    "stop, other clocks": stopped_by_other_clocks,
    "clip": lambda _: clipped(),
    "accumulate": lambda _: accumulated(),
    "save": saved,
    "resume": resumed,
    "by hand": lambda _: by_hand(),
}


def check(folder: Path) -> dict[str, list[str]]:
    """Run everything in this process; return what is wrong by name."""
    return {name: found(folder) for name, found in CHECKS.items()}
