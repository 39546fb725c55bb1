"""Monitors read nothing back in a step and keep nothing of it."""

import gc
import resource

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from zdtrain.device.lagging import LaggingRuntime
from zdtrain.drain import Drain
from zdtrain.monitors import NonFinite, Plateau, Spike, Threshold

from .runs import Net, loader, make_trainer, run

READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")


class Reads(TorchDispatchMode):
    """Counts operations for whose value the host waits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.split("::")[1] in READS
        return func(*args, **(kwargs or {}))


class Every(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Eight(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for index in range(5):
            self.log(f"metric {index}", loss.detach() * index, on_step=True, on_epoch=True)
        return loss


def six():
    return [
        Threshold("train_loss", above=1e9, then="stop"),
        NonFinite(then="skip", stop_after=5),
        Threshold("grad_norm", above=1e9, then="clip"),
        Spike("train_loss", factor=1e6, then="skip"),
        Plateau("metric 1", patience=10**6),
        NonFinite("metric 2", then=lambda event: None),
    ]


@pytest.mark.parametrize("optimizer", ["SGD momentum", "fused AdamW", "SimpleAdam"])
def test_twice_as_many_steps_read_nothing_more(optimizer):
    counts = []
    for batches in (200, 400):
        with Reads() as reads:
            trainer = run(Eight(optimizer, scheduler=False), loader(batches), monitors=six(), lag=3, max_lag_steps=50)
        counts.append((reads.count, trainer.drain.runtime.counters.host_reads))
    assert counts[0] == counts[1]


def test_a_device_is_never_raced_by_the_monitors():
    trainer = make_trainer(monitors=six())
    runtime = LaggingRuntime(lag=20)
    trainer.drain = trainer._connector.drain = Drain(lambda: runtime)
    with runtime.watching():
        trainer.fit(Eight("SimpleAdam"), loader(60, {30: "nan"}))
    assert trainer.skipped_steps == 1
    assert any("copy enqueued on drain" in line for line in runtime.log)
    assert any("monitor waits" in line for line in runtime.log)


def test_memory_stays_flat_over_many_steps():
    sizes = []

    class Sizes(Eight):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx in (600, 1999):
                gc.collect()
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

    run(Sizes("SimpleAdam"), loader(2000), monitors=six(), ema_decay=0.99)
    assert sizes[1] - sizes[0] < 5, "MiB"


def operations_of(optimizer, **options):
    """Return how many operations a step takes once the run has started."""
    counts = []

    class Counted(Eight):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx in (20, 40):
                counts.append(every.count)

    with Every() as every:
        run(Counted(optimizer, scheduler=False), loader(41), **options)
    return (counts[1] - counts[0]) / 20


@pytest.mark.parametrize("optimizer", ["fused AdamW", "SimpleAdam"])
def test_a_step_that_gives_no_reason_to_act_takes_few_operations_more_where_the_host_sees_that(optimizer):
    def acting():
        return [monitor for monitor in six() if monitor.acts_in_step and not isinstance(monitor, Spike)]

    seen = operations_of(optimizer, monitors=acting()) - operations_of(optimizer)
    unseen = operations_of(optimizer, monitors=acting(), lag=3) - operations_of(optimizer, lag=3)
    assert seen <= unseen / 2


def test_without_monitors_a_step_knows_nothing_of_them():
    trainer = run(Net(), loader(3))
    assert trainer.fit_loop.epoch_loop.guard is None
    assert not [callback for callback in trainer.callbacks if type(callback).__name__ == "MonitorState"]


def test_a_trainer_leaves_the_optimizer_as_it_found_it():
    fused, simple = (
        run(Net("fused AdamW"), loader(3), nonfinite="skip"),
        run(Net("SimpleAdam"), loader(3), nonfinite="skip"),
    )
    assert not hasattr(fused.optimizers[0], "found_inf")
    assert simple.optimizers[0].skip_if is None
