"""`steps_per_replay`: k steps in one program train, log and count what k steps one by one do."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import zdtrain
from zdtrain.errors import ConfigError
from zdtrain.optim import SimpleAdam

from .host_graph import GraphRuntime
from .runs import FEATURES, Classifier, assert_equal, assert_same, batches, fit


class Fused(Classifier):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Simple(Classifier):
    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01)


class Metrics(Classifier):
    """Logs in every way, returns more than a loss, has batch norm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )
        self.error = MeanSquaredError()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.error.update(logits[:, 0].contiguous(), x[:, 0].contiguous())
        self.log("mean", self.mean)
        self.log("error", self.error, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", x.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("total", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self):
        return SimpleAdam(self.parameters(), lr=0.01)


class Scheduled(Simple):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class ScheduledFused(Fused):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=7)
        second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [9])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Momentum(Classifier):
    """Takes numbers from the host that change with the epoch only."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Adaptive(Classifier):
    """Takes numbers that the host computes from the count of updates."""

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=0.01)


class Cycling(Classifier):
    """Changes learning rate and betas in every step, of two groups."""

    def configure_optimizers(self):
        first, last = self.net[0].parameters(), self.net[3].parameters()
        optimizer = torch.optim.AdamW([{"params": first}, {"params": last, "weight_decay": 0.1}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=80)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Factored(Classifier):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.05)


class Outside(Classifier):
    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=0.01, foreach=True)


def several(tmp_path, make, k=4, capture="graph", **options):
    """Train one step per replay and k, compare bit for bit, and return the latter."""
    one = fit(tmp_path, make, capture, **options)
    many = fit(tmp_path, make, capture, steps_per_replay=k, **options)
    assert_same(one, many)
    assert_equal(one.trainer.fit_loop.state_dict(), many.trainer.fit_loop.state_dict(), "loops")
    return many


def block_of(outcome):
    """Return the report of the program for several steps."""
    (program,) = [program for program in outcome.report.programs if " steps of " in program.key]
    return program


def reasons(outcome):
    return [str(reason) for reason in outcome.report.fallbacks if reason.code == "steps-per-replay"]


@pytest.mark.parametrize(
    "make", [Fused, Simple, Metrics, Scheduled, ScheduledFused, Momentum, Adaptive, Cycling, Factored]
)
@pytest.mark.parametrize("k", [2, 4, 5])
def test_blocks_train_log_and_count_like_single_steps(tmp_path, make, k):
    many = several(tmp_path, make, k, loader=lambda: batches(16, rest=3))
    program = block_of(many)
    assert program.verification == "equal"
    assert program.verifications == 4 if k < 5 else program.verifications >= 3
    assert program.replays >= 3 * k
    assert program.replays % k == 0
    assert not reasons(many)


class Validated(Simple):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self):
        return batches(2)


@pytest.mark.parametrize(
    "options",
    [
        {"val_check_interval": 3},
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        {"max_steps": 29, "max_epochs": -1},
        {"limit_train_batches": 6},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 4, "max_steps": 29, "max_epochs": -1},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "log_every_n_steps": 3},
    ],
)
def test_nobody_is_passed_by(tmp_path, options):
    many = several(tmp_path, Validated, loader=lambda: batches(13, rest=2), **{"max_epochs": 3, **options})
    every = options.get("val_check_interval", 4)
    if every >= 4:
        assert block_of(many).verification == "equal"
    assert not reasons(many)


def test_checkpoints_hold_what_they_hold_step_by_step(tmp_path):
    kept = {}
    for name, k in (("one", 1), ("many", 4)):
        keep = lambda name=name: [  # noqa: E731
            ModelCheckpoint(tmp_path / name, save_top_k=-1, every_n_train_steps=6, filename="{step}")
        ]
        run = fit(tmp_path, Scheduled, "graph", steps_per_replay=k, callbacks=keep, enable_checkpointing=True)
        kept[name] = {path.name: torch.load(path, weights_only=False) for path in (tmp_path / name).iterdir()}
    assert len(kept["one"]) == 8
    assert block_of(run).replays > 8
    for checkpoints in kept.values():
        for checkpoint in checkpoints.values():
            checkpoint["callbacks"].clear()  # holds the folder's name
    assert_equal(kept["one"], kept["many"], "checkpoints")


def test_resuming_goes_on_in_blocks(tmp_path):
    keep = lambda: [ModelCheckpoint(tmp_path / "kept", every_n_train_steps=18, filename="{step}", save_top_k=-1)]  # noqa: E731
    fit(tmp_path, Scheduled, "graph", max_epochs=2, callbacks=keep, enable_checkpointing=True)
    several(tmp_path, Scheduled, ckpt_path=tmp_path / "kept" / "step=18.ckpt")


class Watches(pl.Callback):
    """Notes what it is shown."""

    def __init__(self):
        self.seen = []

    @zdtrain.only_reads
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append((batch_idx, trainer.global_step, batch[0].clone()))

    @zdtrain.only_reads
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
        outputs = {name: value.clone() for name, value in outputs.items()}
        rate = float(rate)
        self.seen.append((batch_idx, trainer.global_step, outputs, metrics, rate, batch[0].clone()))


@pytest.mark.parametrize("make", [Metrics, Scheduled, ScheduledFused])
def test_callbacks_that_only_read_are_called_for_every_step_with_its_own_values(tmp_path, make):
    seen = []

    def watching():
        seen.append(Watches())
        return [seen[-1], LearningRateMonitor()]

    many = several(tmp_path, make, callbacks=watching, log_every_n_steps=3)
    assert block_of(many).replays > 8
    one, blocks = (watch.seen for watch in seen)
    assert len(one) == 2 * 48
    assert_equal(one, blocks, "seen")


class Freezes(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.net[0].requires_grad_(trainer.current_epoch != 1)


class Tells(Simple):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.norm = self.net[0].weight.norm()


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (Simple, {"callbacks": lambda: [Freezes()]}, "Freezes.on_train_batch_start may read or change"),
        (Tells, {}, "Tells.on_train_batch_end may read or change"),
        (Adaptive, {"nonfinite": "skip"}, "NAdam takes numbers that follow its updates, which monitors may hold back"),
        (Outside, {}, "the optimizer steps outside the program"),
        (Validated, {"val_check_interval": "0:0:10:0", "max_epochs": 1}, "validation is due by the clock"),
        (Simple, {"profiler": "simple"}, "a profiler times the parts of each step"),
    ],
)
def test_what_keeps_steps_apart_is_named_and_they_run_one_by_one(tmp_path, make, options, says):
    many = several(tmp_path, make, **options)
    assert any(says in reason for reason in reasons(many)), reasons(many)
    assert not any(" steps of " in program.key for program in many.report.programs)


def test_without_capture_the_option_says_that_it_does_nothing(tmp_path):
    outcome = fit(tmp_path, Simple, "off", steps_per_replay=4)
    (reason,) = [r for r in outcome.trainer.fit_loop.epoch_loop.fallbacks if r.code == "steps-per-replay"]
    assert "steps are not captured" in str(reason)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y


def test_a_sampler_that_shuffles_may_be_read_ahead(tmp_path):
    def shuffled():
        return DataLoader(batches().dataset, batch_size=8, shuffle=True)

    assert block_of(several(tmp_path, Simple, loader=shuffled)).verification == "equal"


def test_a_loader_that_draws_from_the_steps_generator_is_not_read_ahead(tmp_path):
    def noisy():
        return DataLoader(Noisy(*batches().dataset.tensors), batch_size=8)

    many = several(tmp_path, Simple, loader=noisy)
    assert "draws from the generator" in str(reasons(many))
    assert not any(" steps of " in program.key for program in many.report.programs)


@pytest.mark.parametrize(("several", "window"), [(3, 2), (4, 3)])
def test_an_accumulation_window_is_not_cut_in_two(several, window):
    with pytest.raises(ConfigError, match=f"steps_per_replay={several} .* use a multiple of accumulate_grad_batches"):
        zdtrain.Trainer(steps_per_replay=several, accumulate_grad_batches=window)


@pytest.mark.parametrize("value", [0, -1, True, 2.0])
def test_a_number_of_steps_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="steps_per_replay"):
        zdtrain.Trainer(steps_per_replay=value)


def test_a_program_that_goes_astray_is_found_and_the_steps_run_one_by_one(tmp_path, monkeypatch):
    run = zdtrain.capture.repeated.RepeatedSteps._run

    def astray(self, inputs):
        left = run(self, inputs)
        self.recordings[0].parameters[0].data.add_(1e-4)
        return left

    monkeypatch.setattr("zdtrain.capture.repeated.RepeatedSteps._run", astray)
    many = several(tmp_path, Simple)
    (reason,) = [str(reason) for reason in many.report.fallbacks if reason.code == "verification"]
    assert "4 steps as one program and eager ones disagree: parameter" in reason
    assert block_of(many).replays == 0


def test_without_verification_blocks_run_from_the_start(tmp_path):
    many = several(tmp_path, Simple, verify_capture=False)
    assert block_of(many).verification == "off"
    assert block_of(many).replays >= 40


class Counting(Simple):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + 0.01 * self.trainer.scalars.global_step)
        self.log("step_on_device", self.trainer.scalars.global_step.float())
        return loss


def test_the_step_counter_on_the_device_goes_on_within_a_block(tmp_path):
    assert block_of(several(tmp_path, Counting)).verification == "equal"


def bad(*indices):
    """Return a loader with NaN in the batches of these numbers."""
    x, y = (tensor.clone() for tensor in batches().dataset.tensors)
    for index in indices:
        x[8 * index] = float("nan")
    return lambda: DataLoader(TensorDataset(x, y), batch_size=8)


@pytest.mark.parametrize("action", ["skip", "stop"])
@pytest.mark.parametrize("window", [1, 2])
def test_monitors_act_in_the_very_step(tmp_path, action, window):
    options = {"nonfinite": action, "loader": bad(9), "accumulate_grad_batches": window, "max_epochs": 3}
    options["records"] = tmp_path / "runs"
    many = several(tmp_path, Simple, **options)
    if action == "skip":
        assert block_of(many).replays >= 8
    else:
        assert many.trainer.global_step == (9 if window == 1 else 4)


def test_a_stop_in_the_middle_of_a_replayed_block_takes_the_run_back_to_it(tmp_path):
    class Blows(Simple):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            late = (self.trainer.scalars.global_step == 41).float()
            return loss * (1 + late / (1 - late))

    one, many = (fit(tmp_path, Blows, "graph", nonfinite="stop", steps_per_replay=k) for k in (1, 4))
    for name in ("weights", "optimizers", "metrics", "rows"):  # the generator has moved on to the block's end
        assert_equal(getattr(one, name), getattr(many, name), name)
    assert many.trainer.global_step == 41
    assert block_of(many).replays > 8


@pytest.mark.parametrize("make", [Simple, Metrics, Scheduled, Momentum, Cycling])
def test_in_a_device_graph_a_block_is_one_launch(tmp_path, make, monkeypatch):
    graphs = []

    class Runtime(GraphRuntime):
        def graph(self):
            graphs.append(super().graph())
            return graphs[-1]

    one = fit(tmp_path, make, "graph")
    monkeypatch.setattr(zdtrain.Trainer, "_open_runtime", lambda self: Runtime())
    monkeypatch.setattr("zdtrain.capture.handed.on_device", lambda host, device: host.clone())  # device memory
    many = fit(tmp_path, make, "graph", steps_per_replay=4)
    assert_same(one, many)
    assert block_of(many).verification == "equal"
    _, graph = graphs  # the first is a rehearsal
    assert graph.replays == block_of(many).replays // 4 + block_of(many).verifications


def test_rows_of_a_run_folder_are_those_of_single_steps(tmp_path):
    rows = []
    for k in (1, 4):
        folder = tmp_path / f"runs-{k}"
        fit(tmp_path, Metrics, "graph", steps_per_replay=k, records=folder)
        run = zdtrain.records.load_run(next(folder.glob("*/*")))
        columns = {name: values for name, values in run.columns().items() if name != "wall_time"}
        rows.append(columns)
    assert len(rows[0]["step"]) == 48
    assert rows[0] == rows[1]
