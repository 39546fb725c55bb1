"""A run of captured steps leaves the same bits behind as an eager one."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import zdtrain.capture.tape
from zdtrain.capture.verify import first_mismatch
from zdtrain.optim import SimpleAdam

from .runs import CLASSES, FEATURES, Classifier, assert_equal, assert_same, batches, both, codes, fit


def module_with(make_net, *, step=None):
    class Net(Classifier):
        def __init__(self):
            super().__init__()
            self.net = make_net()

    if step is not None:
        Net.training_step = step
    return Net


def convnet():
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.block(self.up(x.unsqueeze(-1))).mean(1))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.head(self.table((x * 10).long().clamp(0, 49)).sum(1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.b(checkpoint(lambda z: self.a(z).tanh(), x, use_reentrant=False))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cells = kind(1, 6, batch_first=True, **options)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x):
        return self.head(self.cells(x.unsqueeze(-1))[0][:, -1])


def tied():
    first = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(first, nn.Tanh(), first, nn.Linear(FEATURES, CLASSES))


def gradient_penalty(self, batch, batch_idx):
    x, y = batch
    x = x.clone().requires_grad_()
    out = self.net(x)
    loss = F.cross_entropy(out, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    self.log("loss", loss)
    return loss


MODULES = {
    "mlp": Classifier,
    "convnet": module_with(lambda: convnet()),
    "transformer": module_with(Attention),
    "embedding": module_with(Embedding),
    "checkpointing": module_with(Checkpointed),
    "tied": module_with(tied),
    "lstm": module_with(lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2)),
    "gru": module_with(lambda: Recurrent(nn.GRU, bidirectional=True)),
    "rnn": module_with(lambda: Recurrent(nn.RNN)),
    "gradient-penalty": module_with(
        lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)), step=gradient_penalty
    ),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "simple-adam": lambda p: SimpleAdam(p, lr=0.01, weight_decay=0.1),
    "simple-adam-clipped": lambda p: SimpleAdam(p, lr=0.01, max_norm=0.5, skip_nonfinite=True),
    "simple-adam-foreach": lambda p: SimpleAdam(p, lr=0.01, implementation="foreach"),
}

LONG = {"loader": lambda: batches(40), "max_epochs": 5}  # 200 steps


def scheduled(make, schedule):
    def configure_optimizers(self):
        optimizer = make(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    return configure_optimizers


@pytest.mark.parametrize("name", MODULES)
def test_every_kind_of_network_trains_to_the_same_bits(tmp_path, name):
    run = both(tmp_path, MODULES[name], **LONG)
    assert run.report.steps_replayed > run.report.steps_eager
    assert all(program.verification == "equal" for program in run.report.programs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_to_the_same_bits_while_its_lr_changes_every_step(tmp_path, name):
    class Net(Classifier):
        configure_optimizers = scheduled(
            OPTIMIZERS[name], lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        )

    run = both(tmp_path, Net, **LONG)
    (program,) = run.report.programs
    assert program.captures == 1
    assert program.replays > 180
    assert program.includes_optimizer
    assert codes(run) == set()


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "simple-adam"])
def test_accumulation_with_a_partial_last_window_and_clipping(tmp_path, window, clip, optimizer):
    class Net(Classifier):
        def configure_optimizers(self):
            return OPTIMIZERS[optimizer](self.parameters())

    run = both(tmp_path, Net, loader=lambda: batches(40, rest=3), accumulate_grad_batches=window, max_epochs=5, **clip)
    assert run.report.steps_replayed > 150
    assert all(program.verification in ("equal", "not yet") for program in run.report.programs)


def test_one_cycle_cycles_momentum_without_a_second_capture(tmp_path):
    class Net(Classifier):
        configure_optimizers = scheduled(
            OPTIMIZERS["momentum"],
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=48),
        )

    run = both(tmp_path, Net)
    assert [program.captures for program in run.report.programs] == [1]


def test_a_scheduled_momentum_inside_the_program_makes_programs_of_its_own(tmp_path):
    class Net(Classifier):
        configure_optimizers = scheduled(
            OPTIMIZERS["adam-fused"],
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=48),
        )

    run = both(tmp_path, Net)
    assert run.report.steps_replayed == 0


def test_plateau_and_epoch_schedulers(tmp_path):
    class Net(Classifier):
        def configure_optimizers(self):
            optimizer = SimpleAdam(self.parameters(), lr=0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}

    run = both(tmp_path, Net)
    assert [program.captures for program in run.report.programs] == [1]


def test_bf16_autocast(tmp_path):
    run = both(tmp_path, Classifier, precision="bf16-mixed", **LONG)
    assert run.report.steps_replayed > run.report.steps_eager


@pytest.mark.parametrize(
    "make",
    [
        OPTIMIZERS["adam"],
        OPTIMIZERS["adamw"],
        OPTIMIZERS["adamw-fused"],
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),  # with momentum torch's kernel does not repeat itself
    ],
)
def test_bf16_weights(tmp_path, make):
    class Net(Classifier):
        def configure_optimizers(self):
            return make(self.parameters())

    run = both(tmp_path, Net, precision="bf16-true", **LONG)
    assert run.report.steps_replayed > run.report.steps_eager
    assert run.report.programs[0].includes_optimizer
    assert codes(run) == set()


def test_bf16_weights_of_an_optimizer_that_rounds_in_two_ways_are_updated_behind_the_replay(tmp_path):
    run = both(tmp_path, Classifier, precision="bf16-true")
    assert run.report.steps_replayed > run.report.steps_eager
    (reason,) = run.report.fallbacks
    assert reason.code == "optimizer-outside"
    assert "adds multiples of bfloat16 tensors" in reason.message


def test_matrices_are_updated_by_muon_and_the_rest_by_adamw(tmp_path):
    class Net(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            self.log("loss", loss)

        def configure_optimizers(self):
            matrices = [p for p in self.parameters() if p.dim() == 2]
            rest = [p for p in self.parameters() if p.dim() != 2]
            return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    run = both(tmp_path, Net, **LONG)
    assert run.report.steps_replayed > run.report.steps_eager


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_numbers_made_of_nothing_or_of_integers_have_the_dtype_that_the_precision_makes_the_default(
    tmp_path, precision
):
    class Noisy(Classifier):
        def loss(self, batch):
            x, y = batch
            noise = torch.rand(x.shape) * y[:, None] / 10 + torch.arange(0.0, FEATURES)
            return nn.functional.cross_entropy(self.net(x + noise), y)

    run = both(tmp_path, Noisy, precision=precision)
    assert run.report.steps_replayed > run.report.steps_eager


def test_batches_of_several_shapes_have_programs_of_their_own(tmp_path):
    class Dicts(Classifier):
        def training_step(self, batch, batch_idx):
            loss = self.loss((batch["x"], batch["more"][0]))
            self.log("loss", loss)
            return loss

    def loader():
        sizes = [8, 8, 4, 8, 4, 4, 8, 4] * 3
        made = [
            {"x": torch.randn(n, FEATURES), "more": [torch.randint(0, CLASSES, (n,)), "name"], "k": 2} for n in sizes
        ]
        return DataLoader(made, batch_size=None)

    run = both(tmp_path, Dicts, loader=loader)
    assert len(run.report.programs) == 2
    assert run.report.steps_replayed > run.report.steps_eager


def test_validation_in_the_middle_of_an_epoch_needs_no_new_program(tmp_path):
    class Net(module_with(lambda: convnet())):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self):
            return batches(2)

    run = both(tmp_path, Net, val_check_interval=4)
    assert [(program.step, program.captures) for program in run.report.programs] == [
        ("training_step", 1),
        ("validation_step", 1),
    ]
    assert run.report.steps_replayed > 25


@pytest.mark.parametrize("name", ["adam-fused", "adam", "momentum", "simple-adam"])
def test_resuming_in_the_middle_of_an_epoch(tmp_path, name):
    class Net(Classifier):
        def configure_optimizers(self):
            return OPTIMIZERS[name](self.parameters())

    def saver():
        return [ModelCheckpoint(tmp_path / "saved", every_n_train_steps=19, save_top_k=-1, filename="{step}")]

    first = {}
    for capture in ("off", "graph"):
        fit(tmp_path, Net, capture, callbacks=saver, enable_checkpointing=True)
        path = tmp_path / "saved" / "step=19.ckpt"
        first[capture] = torch.load(path, weights_only=False)
        path.rename(tmp_path / f"{capture}.ckpt")
        for file in (tmp_path / "saved").iterdir():
            file.unlink()
    assert_equal(*(saved["optimizer_states"] for saved in first.values()), "optimizer states")
    kinds = [type(saved["optimizer_states"][0]["param_groups"][0]["lr"]) for saved in first.values()]
    assert kinds[0] is kinds[1]
    resumed = [
        fit(tmp_path, Net, capture, ckpt_path=tmp_path / f"{other}.ckpt")
        for capture, other in (("off", "off"), ("graph", "off"), ("graph", "graph"))
    ]
    assert_same(resumed[0], resumed[1])
    assert_same(resumed[0], resumed[2])


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_counts_that_loading_makes_wider_are_counted_as_torch_counts_them(tmp_path, kind):
    class Net(Classifier):
        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.01)

    fit(tmp_path, Net, "off", max_epochs=1, precision="64-true").trainer.save_checkpoint(tmp_path / "one.ckpt")
    eager, captured = [
        fit(tmp_path, Net, capture, ckpt_path=tmp_path / "one.ckpt", max_epochs=8, precision="64-true")
        for capture in ("off", "graph")
    ]
    assert_same(eager, captured)
    assert "since a checkpoint was loaded" in " ".join(reason.message for reason in captured.report.fallbacks)


def test_gradients_are_fresh_tensors_after_every_step_as_in_an_eager_run(tmp_path):
    class Net(Classifier):
        kept: list = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            type(self).kept.append((outputs["loss"], self.net[0].weight.grad))

    runs = []
    for capture in ("off", "graph"):
        Net.kept = []
        fit(tmp_path, Net, capture)
        runs.append(Net.kept)
    for (loss, gradient), (same_loss, same_gradient) in zip(*runs, strict=True):
        assert torch.equal(loss, same_loss)
        assert torch.equal(gradient, same_gradient)


def test_extra_outputs_of_the_step_reach_on_train_batch_end(tmp_path):
    class Net(Classifier):
        seen: list = []

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return {"loss": loss, "twice": {"x": loss.detach() * 2}, "name": "n"}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            type(self).seen.append(outputs)

    runs = []
    for capture in ("off", "graph"):
        Net.seen = []
        report = fit(tmp_path, Net, capture).report
        runs.append(Net.seen)
    assert report.steps_replayed > 30
    for eager, captured in zip(*runs, strict=True):
        assert eager == captured


def test_gradients_of_parameters_without_an_optimizer_go_on_accumulating(tmp_path):
    class Net(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    runs = [fit(tmp_path, Net, capture) for capture in ("off", "graph")]
    assert_same(*runs)
    assert runs[1].report.steps_replayed > 30
    assert torch.equal(*(run.module.net[3].weight.grad for run in runs))


def test_an_unlogged_module_and_a_loss_of_shape_one(tmp_path):
    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            return self.loss(batch).reshape(1)

    assert both(tmp_path, Net).report.steps_replayed > 30


def test_capture_is_off_on_a_cpu_unless_asked_for(tmp_path):
    run = fit(tmp_path, Classifier, "auto")
    assert run.report.capture == "off"
    assert run.report.programs == ()
    assert isinstance(run.module, pl.LightningModule)


class ChangesEveryScalar(Callback):
    """Sets the learning rate, weight decay, loss weight and, with SimpleAdam, the threshold before each step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        for name in ("lr", "weight_decay"):
            optimizer.param_groups[0][name] = 0.01 / (1 + trainer.global_step)
        if "betas" in optimizer.param_groups[0] and not isinstance(optimizer, SimpleAdam):
            optimizer.param_groups[0]["betas"] = (0.9 - 0.001 * batch_idx, 0.999 - 0.001 * batch_idx)
        if isinstance(optimizer, SimpleAdam):
            optimizer.max_norm = 1 + 0.1 * batch_idx
        trainer.scalars.weight = 1 + 0.01 * batch_idx


class Weighted(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * self.trainer.scalars.weight
        self.log("loss", loss)
        return loss


CHANGING = {
    "simple-adam": lambda p: SimpleAdam(p, lr=0.01, weight_decay=torch.tensor(0.1), max_norm=1.0),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("capture", ["graph", "compile"])
@pytest.mark.parametrize("name", CHANGING)
def test_nothing_is_captured_or_compiled_twice_while_every_scalar_changes_every_step(
    tmp_path, monkeypatch, name, capture
):
    lowered = []

    def lower(graph, arguments):
        lowered.append(graph)
        return graph.forward  # what is compiled is the affair of `test_compiled.py`

    monkeypatch.setattr(zdtrain.capture.tape, "lower", lower)

    class Net(Weighted):
        def configure_optimizers(self):
            return CHANGING[name](self.parameters())

    options = {"callbacks": lambda: [ChangesEveryScalar()], "scalars": {"weight": 1.0}}
    eager, run = (fit(tmp_path, Net, choice, **options) for choice in ("off", capture))
    if capture == "graph":
        assert_same(eager, run)
    else:
        assert first_mismatch(eager.weights, run.weights, exact=False) is None
    assert [program.captures for program in run.report.programs] == [1]
    assert len(lowered) == (capture == "compile")
    assert run.report.steps_replayed > 35
    assert codes(run) == set()


def test_groups_with_options_of_their_own_and_one_that_is_added_in_mid_run(tmp_path):
    class Net(Classifier):
        def configure_optimizers(self):
            groups = [{"params": [self.net[0].weight], "weight_decay": 0.1}, {"params": [self.net[0].bias], "lr": 0.02}]
            return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                self.optimizers().add_param_group({"params": self.net[3].parameters(), "lr": 0.03, "amsgrad": True})

    run = both(tmp_path, Net)
    assert [program.captures for program in run.report.programs] == [1, 1]
    assert codes(run) == set()
