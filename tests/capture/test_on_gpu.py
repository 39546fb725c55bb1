"""Captured steps on a GPU: what only a device can get wrong. Not yet run on hardware.

docs/capture.md maps pitfalls to tests; what needs no device is tested on the host, in the modules beside this one.
"""

import gc
import os
import subprocess
import sys
import threading

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from zdtrain.capture.graph import rehearse
from zdtrain.capture.verify import first_mismatch
from zdtrain.device import runtime_for
from zdtrain.monitors import NonFinite, Threshold
from zdtrain.optim import SimpleAdam

from .runs import CLASSES, FEATURES, QUIET, Classifier, Metered, assert_equal, assert_same, batches, both, codes, fit

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
DEVICE = "cuda"
ON_GPU = {"accelerator": "gpu"}


class Adam(Classifier):
    def configure_optimizers(self):
        optimizer = SimpleAdam(self.parameters(), lr=0.01, weight_decay=0.1, max_norm=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Convolutional(Adam):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, FEATURES // 2)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * FEATURES, CLASSES),
        )


class Attending(Adam):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def loss(self, batch):
        x, y = batch
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # its backward repeats itself
            hidden = self.block(self.embed(x.unsqueeze(2)))
        return nn.functional.cross_entropy(self.head(hidden.mean(1)), y)


class Embedding(Adam):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.head = nn.Linear(16, CLASSES)

    def loss(self, batch):
        x, y = batch
        words = (x.abs() * 10).long().clamp(max=49)
        return nn.functional.cross_entropy(self.head(self.table(words).sum(1)), y)


def replayed(run, at_least=20):
    """Check that the run was captured, compared and replayed."""
    assert run.report.steps_replayed > at_least, run.report.table()
    assert not {"untraceable", "verification"} & codes(run), run.report.table()
    return run


# The default


def test_by_default_steps_are_captured_and_leave_the_bits_of_an_eager_run(tmp_path):
    class Validates(Adam):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self):
            return batches(6)

    run = replayed(both(tmp_path, Validates, "auto", **ON_GPU))
    assert run.report.capture == "graph"
    assert run.report.evaluation_replayed > 0
    assert not codes(run)


def test_by_default_a_step_that_cannot_be_captured_runs_eagerly_and_is_named(tmp_path):
    class Reads(Adam):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if loss.item() > 100:
                raise RuntimeError("diverged")
            return loss

    run = both(tmp_path, Reads, "auto", **ON_GPU)
    assert run.report.steps_replayed == 0
    assert codes(run) == {"host-read"}


def test_the_device_can_do_all_that_captured_steps_ask_of_it():
    runtime = runtime_for(torch.device(DEVICE))
    state = runtime.rng_state()
    rehearse(runtime)
    assert_equal(list(runtime.rng_state()), list(state), "generators")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    runtime.release_pool()


def test_a_run_out_of_memory_tells_what_captured_steps_hold(tmp_path):
    class Net(Adam):
        def on_train_epoch_end(self):
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(tmp_path, Net, "auto", **ON_GPU)
    assert "captured steps hold" in caught.value.__notes__[0]


def test_a_step_that_needs_more_than_half_of_the_memory_is_trained_without_a_graph(tmp_path):
    torch.cuda.empty_cache()
    size = int(0.6 * torch.cuda.mem_get_info()[0])

    class Large(Adam):
        def loss(self, batch):
            return super().loss(batch) + torch.zeros(size, dtype=torch.uint8, device=self.device)[0]

    run = both(tmp_path, Large, "auto", **ON_GPU, max_epochs=2)
    assert codes(run) == {"out-of-memory"}
    assert run.report.steps_replayed == 0


def test_asynchronous_checkpoints_hold_the_weights_of_their_step(tmp_path):
    saved = []
    for capture in ("off", "auto"):
        folder = tmp_path / capture
        checkpoints = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=17, save_top_k=-1)
        options = {"callbacks": lambda kept=checkpoints: [kept], "plugins": AsyncCheckpointIO()}
        run = fit(tmp_path, Adam, capture, **ON_GPU, enable_checkpointing=True, **options)
        saved.append([torch.load(path, weights_only=False)["state_dict"] for path in sorted(folder.glob("*.ckpt"))])
    replayed(run)
    assert len(saved[0]) == 2
    assert_equal(saved[0], saved[1], "weights")


# Parity


@pytest.mark.parametrize("module", [Adam, Classifier, Convolutional, Attending, Embedding])
@pytest.mark.parametrize("window", [1, 3])
def test_a_graph_leaves_the_bits_of_an_eager_run(tmp_path, module, window):
    run = both(tmp_path, module, **ON_GPU, loader=lambda: batches(12, rest=3), accumulate_grad_batches=window)
    replayed(run)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true", "16-mixed"])
def test_a_graph_leaves_the_bits_of_an_eager_run_in_every_precision(tmp_path, precision):
    replayed(both(tmp_path, Adam, **ON_GPU, precision=precision))


def test_16_mixed_trains_like_stock_lightning_and_skips_overflowing_steps(tmp_path):
    class Overflows(Classifier):
        def loss(self, batch):
            return super().loss(batch) * 300  # the first scales, 65536 and on, overflow

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    captured = fit(tmp_path, Overflows, "graph", **ON_GPU, precision="16-mixed")
    torch.manual_seed(0)
    module = Overflows()
    torch.manual_seed(7)
    stock = pl.Trainer(**{**QUIET, **ON_GPU, "max_epochs": 4, "logger": False, "precision": "16-mixed"})
    stock.fit(module, batches())
    assert first_mismatch(module.state_dict(), captured.weights, exact=False) is None
    assert captured.trainer.precision_plugin.scaler.get_scale() == stock.precision_plugin.scaler.get_scale()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_lowered_step_in_a_graph_trains_within_tolerance(tmp_path, precision):
    eager, lowered = (fit(tmp_path, Adam, capture, **ON_GPU, precision=precision) for capture in ("off", "compile"))
    replayed(lowered)
    (program,) = lowered.report.programs
    assert program.verification == "within tolerance"
    assert program.memory_bytes > 0
    assert first_mismatch(eager.weights, lowered.weights, exact=False) is None


def test_validation_in_the_middle_and_several_shapes_share_the_pool(tmp_path):
    class Validates(Adam):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self):
            return batches(3, rest=5)

    def shapes():
        sizes = (8, 3, 8, 5, 8, 3, 5)
        generator = torch.Generator().manual_seed(1)
        x, y = (torch.randn(4 * sum(sizes), FEATURES, generator=generator), torch.arange(4 * sum(sizes)) % CLASSES)
        rows = iter(range(len(x)))
        order = [[next(rows) for _ in range(size)] for size in 4 * sizes]
        return DataLoader(TensorDataset(x, y), batch_sampler=order)

    run = both(tmp_path, Validates, **ON_GPU, loader=shapes, accumulate_grad_batches=2, val_check_interval=0.5)
    replayed(run)
    assert len(run.report.programs) > 3


def test_a_run_resumed_from_a_checkpoint_leaves_the_bits_of_one_that_went_through(tmp_path):
    def checkpointing():
        return [pl.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_train_steps=17, save_top_k=-1)]

    whole = fit(tmp_path, Adam, "graph", **ON_GPU, enable_checkpointing=True, callbacks=checkpointing)
    (path, *_) = sorted((tmp_path / "kept").glob("*step=34*"))
    resumed = fit(tmp_path, Adam, "graph", **ON_GPU, ckpt_path=path)
    # Lightning's checkpoints hold no generator: dropout draws other numbers, so compare with the eager resumption
    eager = fit(tmp_path, Adam, "off", **ON_GPU, ckpt_path=path)
    assert_same(eager, replayed(resumed, 5))
    replayed(whole)


# Host reads and waits


class Strict(pl.Callback):
    """Lets torch raise at a host read, in steps that are replayed."""

    def __init__(self, first: int, last: int) -> None:
        self.steps = range(first, last)
        self.waits = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("error" if batch_idx in self.steps else "default")
        if batch_idx == self.steps.start:
            self.waits = trainer.drain.runtime.counters.host_waits
        if batch_idx == self.steps.stop:
            self.waits = trainer.drain.runtime.counters.host_waits - self.waits

    def on_exception(self, trainer, pl_module, exception):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("capture", ["off", "graph", "compile"])
@pytest.mark.parametrize("options", [{}, {"prefetch": True}, {"nonfinite": "skip"}], ids=str)
def test_steps_read_nothing_back(tmp_path, capture, options):
    strict = Strict(12, 36)

    class Net(Adam):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("bar", loss.detach() * 2, prog_bar=True)
            return loss

    run = fit(tmp_path, Net, capture, **ON_GPU, loader=lambda: batches(40), callbacks=lambda: [strict], **options)
    assert strict.waits == 0
    assert run.report.host_reads == 0
    if capture != "off":
        replayed(run)


def test_a_host_read_in_a_captured_step_is_taken_back_and_dropout_still_draws(tmp_path):
    class Net(Adam):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if torch.cuda.is_current_stream_capturing():  # no watched step reads
                loss.item()
            return loss

    eager, captured = (fit(tmp_path, Net, capture, **ON_GPU) for capture in ("off", "graph"))
    assert_same(eager, captured)
    (reason,) = [reason for reason in captured.report.fallbacks if reason.code == "untraceable"]
    assert "captur" in reason.message
    again = fit(tmp_path, Adam, "graph", **ON_GPU)  # the allocator and the generator are as they were
    replayed(again)


def test_a_refused_capture_leaves_the_runtime_as_it_was():
    runtime = runtime_for(torch.device(DEVICE))
    x = torch.ones(1000, device=DEVICE)
    nn.functional.dropout(x)
    with pytest.raises(RuntimeError), runtime.graph().capture():
        nn.functional.dropout(x).sum().item()
    torch.cuda.empty_cache()  # asserts that no capture is under way
    state = runtime.rng_state()
    want = nn.functional.dropout(x)
    runtime.restore_rng(state)
    graph = runtime.graph()
    with graph.capture():
        got = nn.functional.dropout(x)
    graph.replay()
    assert torch.equal(got, want)
    graph.reset()


def test_a_pool_outlives_its_graphs():
    runtime = runtime_for(torch.device(DEVICE))
    for _ in range(3):
        graph = runtime.graph()
        with graph.capture():
            kept = torch.ones(1 << 20, device=DEVICE)
        graph.replay()
        graph.reset()  # while `kept` lies in the pool
    assert kept.sum().item() == 1 << 20


# Streams and threads


def test_gradients_bound_to_another_stream_before_fit_train_right_or_are_named(tmp_path):
    class Net(Adam):
        def on_fit_start(self):
            loss = self.loss((torch.ones(8, FEATURES, device=self.device), torch.zeros(8).long().to(self.device)))
            loss.backward()
            self.bound = [loss.grad_fn]  # keeps the nodes that accumulate gradients, and their stream
            self.zero_grad()

    run = both(tmp_path, Net, **ON_GPU)
    assert run.report.steps_replayed > 20 or codes(run)


def test_work_on_the_default_stream_trains_right_or_is_named(tmp_path):
    class Net(Adam):
        def loss(self, batch):
            x, y = batch
            here, other = torch.cuda.current_stream(), torch.cuda.default_stream()
            other.wait_stream(here)
            with torch.cuda.stream(other):
                x = x * 2
            here.wait_stream(other)
            return super().loss((x, y))

    run = both(tmp_path, Net, **ON_GPU)
    assert run.report.steps_replayed > 20 or codes(run)


def test_a_thread_that_asks_for_events_does_not_spoil_a_capture(tmp_path):
    done = threading.Event()

    def ask():
        while not done.is_set():
            event = torch.cuda.Event()
            event.record(torch.cuda.Stream())
            event.query()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        replayed(both(tmp_path, Adam, **ON_GPU))
    finally:
        done.set()
        thread.join()


def test_pinning_workers_do_not_spoil_a_capture(tmp_path):
    def pinning():
        return DataLoader(batches().dataset, batch_size=8, pin_memory=True, num_workers=1, persistent_workers=True)

    replayed(both(tmp_path, Adam, **ON_GPU, loader=pinning))


def test_garbage_in_mid_capture_is_left_alone(tmp_path):
    class Net(Adam):
        def loss(self, batch):
            cycle = [torch.ones(64, device=self.device), torch.cuda.Event()]
            cycle.append(cycle)
            return super().loss(batch)

    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        replayed(both(tmp_path, Net, **ON_GPU))
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("capture", ["off", "graph"])
def test_monitors_on_their_stream_act_in_the_very_step(tmp_path, capture):
    heard = []
    limit = Threshold("loss", above=1e9, then=lambda event: heard.append(event))
    monitors = [limit, NonFinite(then="skip")]

    class Spoilt(Adam):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * torch.where(batch[0][0, 0] > 2.0, float("nan"), 1.0)

    run = fit(tmp_path, Spoilt, capture, **ON_GPU, monitors=monitors)
    assert all(weight.isfinite().all() for weight in run.weights.values())
    if capture == "graph":
        eager = fit(tmp_path, Spoilt, "off", **ON_GPU, monitors=[NonFinite(then="skip")])
        assert first_mismatch(eager.weights, run.weights, exact=True) is None


def test_a_copy_overlaps_the_step_before_it():
    runtime = runtime_for(torch.device(DEVICE))
    host = runtime.pinned((1 << 24,), torch.float32)
    target = torch.empty(1 << 24, device=DEVICE)
    free, done, step = runtime.event(), runtime.event(), runtime.event()
    runtime.synchronize()
    free.record("train")
    torch.cuda._sleep(1_000_000_000)  # half a second: the step
    step.record("train")
    runtime.copy_async(target, host, "copy", after=free, done=done)
    done.synchronize()
    assert not step.query()
    runtime.synchronize()


@pytest.mark.parametrize("capture", ["off", "graph"])
def test_prefetched_batches_are_not_overwritten_while_steps_run(tmp_path, capture):
    class Slow(Adam):
        def loss(self, batch):
            x, y = batch
            large = x.repeat(512, 512)  # gives copies time to overtake
            return super().loss((large[: len(x), :FEATURES] + 0 * large.sum(), y))

    plain, ahead = (fit(tmp_path, Slow, capture, **ON_GPU, prefetch=prefetch) for prefetch in (False, True))
    assert_same(plain, ahead)


# What programs hold


def test_what_a_callback_keeps_is_not_overwritten_by_the_next_launch(tmp_path):
    class Net(Adam):
        kept: list = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            type(self).kept.append(outputs["loss"])

    losses = []
    for capture in ("off", "graph"):
        Net.kept = []
        run = fit(tmp_path, Net, capture, **ON_GPU)
        losses.append(torch.stack(Net.kept).cpu())
    replayed(run)
    assert torch.equal(*losses)


def test_gradients_that_a_callback_keeps_are_not_overwritten_by_the_next_launch(tmp_path):
    class Keeps(pl.Callback):
        def __init__(self):
            self.kept = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.kept.append([parameter.grad for parameter in module.parameters()])

    keepers = {capture: Keeps() for capture in ("off", "graph")}
    for capture, kept in keepers.items():
        run = fit(tmp_path, Adam, capture, **ON_GPU, callbacks=lambda kept=kept: [kept])
    replayed(run)
    assert_equal(keepers["off"].kept, keepers["graph"].kept, "gradients")


class MeteredAdam(Metered, Adam):
    """Metrics of the one, the optimizer of the other."""


def test_torchmetrics_and_replaced_attributes_live_through_launches(tmp_path):
    replayed(both(tmp_path, MeteredAdam, **ON_GPU))


def test_a_copy_from_the_host_in_the_step_trains_right_and_is_named(tmp_path):
    class Net(Adam):
        def loss(self, batch):
            weights = torch.tensor([0.2, 0.3, 0.5]).to(self.device)  # pageable memory, gone when a graph is launched
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=weights)

    run = both(tmp_path, Net, **ON_GPU)
    assert run.report.steps_replayed == 0
    assert codes(run)


@pytest.mark.parametrize("preserves", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_trains_right_or_is_named(tmp_path, preserves, reentrant):
    class Net(Adam):
        def loss(self, batch):
            x, y = batch
            x = x.requires_grad_() if reentrant else x
            out = checkpoint(self.net, x, use_reentrant=reentrant, preserve_rng_state=preserves)
            return nn.functional.cross_entropy(out, y)

    run = both(tmp_path, Net, **ON_GPU)
    assert run.report.steps_replayed > 20 or codes(run)


def test_additions_in_the_order_of_arrival_are_compared_within_tolerance(tmp_path):
    class Net(Adam):
        def loss(self, batch):
            x, y = batch
            index = torch.zeros(100_000, dtype=torch.long, device=x.device)
            spread = (x.sum() * torch.linspace(0, 1, 100_000, device=x.device)).requires_grad_(False)
            total = torch.zeros(1, device=x.device).index_add(0, index, spread)
            return super().loss((x, y)) + 1e-6 * total.sum() * self.net[0].weight.sum()

    run = fit(tmp_path, Net, "graph", **ON_GPU)
    replayed(run)
    assert run.report.programs[0].verification in ("equal", "within tolerance")


def test_a_layer_frozen_at_an_epoch_and_new_learning_rates_are_followed(tmp_path):
    class Net(Adam):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch != 2)
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + self.current_epoch)

    replayed(both(tmp_path, Net, **ON_GPU))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_of_torch_train_as_an_eager_run_within_tolerance(tmp_path, kind, fused):
    class Net(Classifier):
        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.01, fused=fused)

    eager, captured = (fit(tmp_path, Net, capture, **ON_GPU) for capture in ("off", "graph"))
    replayed(captured)
    assert captured.report.programs[0].includes_optimizer
    assert first_mismatch(eager.weights, captured.weights, exact=False) is None
    assert_equal(eager.optimizers[0]["param_groups"], captured.optimizers[0]["param_groups"], "groups")
    for state, same in zip(*(run.optimizers[0]["state"].values() for run in (eager, captured)), strict=True):
        assert state.get("step") == same.get("step")


# Memory and the end


def test_programs_tell_their_memory_and_give_it_back_when_fit_ends(tmp_path):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    run = fit(tmp_path, Adam, "graph", **ON_GPU)
    assert all(program.memory_bytes > 0 for program in run.report.programs)
    assert "KiB" in run.report.table() or "MiB" in run.report.table()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 64 << 20  # workspaces of libraries stay


PROGRAM = """
import sys
import torch, lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
import zdtrain, zdtrain.optim
kind, devices, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
class Model(BoringModel):
    def configure_optimizers(self):
        return zdtrain.optim.SimpleAdam(self.parameters(), lr=0.01)
trainer_class, options = (pl.Trainer, {}) if kind == "stock" else (zdtrain.Trainer, {"capture": kind})
pl.seed_everything(0)
model = Model()
trainer = trainer_class(accelerator="gpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options)
trainer.fit(model)
if trainer.is_global_zero:
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, out)
    if kind != "stock":
        print(trainer.capture_report.table())
"""


def trained(tmp_path, kind, devices):
    """Train in a process of its own; return the weights and what it printed."""
    script, out = tmp_path / "program.py", tmp_path / f"{kind}.pt"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), kind, str(devices), str(out)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # nothing is installed
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return torch.load(out), done.stdout


def test_a_process_with_graphs_ends(tmp_path):
    stock, _ = trained(tmp_path, "stock", 1)
    captured, said = trained(tmp_path, "graph", 1)
    assert first_mismatch(stock, captured, exact=False) is None
    assert "equal" in said


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus_train_like_stock_lightning_and_the_run_says_how(tmp_path):
    stock, _ = trained(tmp_path, "stock", 2)
    captured, said = trained(tmp_path, "graph", 2)
    assert first_mismatch(stock, captured, exact=True) is None
    assert "[strategy]" in said
