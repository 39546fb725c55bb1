"""What a recording would get wrong trains right anyway, and is named with its line."""

import ctypes
import logging
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from .runs import CLASSES, FEATURES, Classifier, batches, both, codes, fit, trap_line

LOSSES = []
UNSEEN = ctypes.c_double()  # what it holds is known to C only


class Deterministic(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class UsesBatchIdx(Deterministic):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx)  # trap


class Counts(Deterministic):
    n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1  # trap
        return self.loss(batch) * self.n


class ReadsGlobalStep(Deterministic):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.global_step)  # trap


class ReadsMetrics(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss * (1 + len(self.trainer.callback_metrics))  # trap


class DrawsFromRandom(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if random.random() < 0.5:  # trap
            return loss * 2
        return loss


class DrawsFromNumpy(Deterministic):
    def training_step(self, batch, batch_idx):
        noise = torch.from_numpy(np.random.standard_normal(1).astype("float32"))  # trap
        return self.loss(batch) * noise.sum()


class BranchesOnItem(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 2 if loss.item() > 1 else loss  # trap


class BranchesOnTensor(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if loss > 1:  # trap
            loss = loss * 2
        return loss


class IndexesByMask(Deterministic):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x)[y > 0], y[y > 0])  # trap


class AppendsToOwnList(Deterministic):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())  # trap
        return loss


class AppendsToGlobalList(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        LOSSES.append(loss.detach().clone())  # trap
        return loss


class SumsInList(Deterministic):
    def __init__(self):
        super().__init__()
        self.sums = [torch.zeros(())]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.sums[0].add_(loss.detach())  # trap
        return loss + self.sums[0]


class BakesClassNumber(Deterministic):
    scale = [1.0]

    def training_step(self, batch, batch_idx):
        self.scale[0] *= 0.9  # trap
        return self.loss(batch) * self.scale[0]

    @classmethod
    def reset(cls):
        cls.scale[0] = 1.0


class BakesTensorLiteral(BakesClassNumber):
    def training_step(self, batch, batch_idx):
        self.scale[0] *= 0.9  # trap
        return self.loss(batch) * torch.tensor(self.scale[0])


class CarriesGlobalTensor(Deterministic):
    held = {}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.held["mean"] = 0.9 * self.held.get("mean", torch.zeros(())) + 0.1 * loss.detach()  # trap
        return loss * self.held["mean"]

    @classmethod
    def reset(cls):
        cls.held.clear()


class HooksIntoModule(Deterministic):
    def __init__(self):
        super().__init__()
        self.net.register_forward_hook(lambda module, args, out: LOSSES.append(float(out.sum())))  # trap


class KeepsEveryBatch(Deterministic):
    def __init__(self):
        super().__init__()
        self.metric = MulticlassAccuracy(CLASSES, average=None, validate_args=False)
        self.metric.add_state("seen", [], dist_reduce_fx="cat")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.metric.seen.append(loss.detach())
        return loss


class LogsWithGraph(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, enable_graph=True)
        return loss


class ReplacesLearningRate(Deterministic):
    def training_step(self, batch, batch_idx):
        self.decay()
        return self.loss(batch)

    def decay(self):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.99  # trap


class ReplacesFusedLearningRate(ReplacesLearningRate):
    def decay(self):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.99  # trap

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class ReplacesWeightDecay(Deterministic):
    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["weight_decay"] += 0.01  # trap
        return self.loss(batch)


class StepsScheduler(Deterministic):
    def training_step(self, batch, batch_idx):
        self.lr_schedulers().step()  # trap
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch", "frequency": 100}}


class StepsItsOwnScheduler(Deterministic):
    def training_step(self, batch, batch_idx):
        self.schedule.step()  # trap
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = [torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5), torch.optim.lr_scheduler.StepLR(optimizer, 15)]
        self.schedule = torch.optim.lr_scheduler.ChainedScheduler(steps)
        return optimizer


class PrintsLoss(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        print(loss, end="")  # trap
        return loss


class LogsText(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        logging.getLogger(__name__).warning("%s", loss)  # trap
        return loss


class WeighsByNumpy(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * float(loss.detach().numpy())  # trap


class WeighsByList(Deterministic):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * loss.tolist()  # trap


TRAPS = {
    SumsInList: "outside-write",
    ReplacesLearningRate: "lr-replaced",
    ReplacesFusedLearningRate: "lr-replaced",
    ReplacesWeightDecay: "lr-replaced",
    StepsScheduler: "scheduler-by-hand",
    StepsItsOwnScheduler: "scheduler-by-hand",
    PrintsLoss: "host-read",
    LogsText: "host-read",
    WeighsByNumpy: "host-read",
    WeighsByList: "host-read",
    UsesBatchIdx: "batch-idx",
    Counts: "python-state",
    ReadsGlobalStep: "trainer-state",
    ReadsMetrics: "trainer-state",
    DrawsFromRandom: "host-randomness",
    DrawsFromNumpy: "host-randomness",
    BranchesOnItem: "host-read",
    BranchesOnTensor: "host-read",
    IndexesByMask: "host-read",
    AppendsToOwnList: "python-state",
    AppendsToGlobalList: "kept-tensor",
    BakesClassNumber: "python-state",
    BakesTensorLiteral: "python-state",
    CarriesGlobalTensor: "kept-tensor",
    HooksIntoModule: "tensor-hook",
}


@pytest.mark.parametrize("module", TRAPS, ids=lambda cls: cls.__name__)
def test_a_trap_trains_right_and_is_named_with_its_line(tmp_path, module):
    def make():
        random.seed(0)
        np.random.seed(0)
        getattr(module, "reset", lambda: None)()
        return module()

    run = both(tmp_path, make)
    assert (run.report.steps_eager, run.report.steps_replayed) == (48, 0)
    found = {(reason.code, reason.file, reason.line) for reason in run.report.fallbacks}
    assert (TRAPS[module], __file__, trap_line(module)) in found


def test_a_metric_that_keeps_every_batch_is_named(tmp_path):
    run = both(tmp_path, KeepsEveryBatch)
    assert "metric-list-state" in codes(run)
    assert run.report.steps_replayed == 0


def test_a_value_logged_with_its_graph_is_named(tmp_path):
    assert "logged-graph" in codes(both(tmp_path, LogsWithGraph))


def test_a_step_that_reads_the_epoch_gets_a_program_per_epoch(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1 + self.current_epoch)

    run = both(tmp_path, Net)
    assert codes(run) == set()
    assert run.report.steps_replayed > 20
    assert len(run.report.programs) == 4


def test_the_device_scalar_for_the_step_count_can_be_captured(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1 + self.trainer.scalars.global_step)

    assert both(tmp_path, Net).report.steps_replayed > 30


class UpdatesTwice(MulticlassAccuracy):
    full_state_update = True


@pytest.mark.parametrize("kind", [MulticlassAccuracy, UpdatesTwice])
def test_torchmetrics_inside_the_step(tmp_path, kind):
    class Net(Deterministic):
        def __init__(self):
            super().__init__()
            self.accuracy = kind(CLASSES, average="micro", validate_args=False)
            self.error = MeanSquaredError()

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            self.accuracy(out, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.error.update(out.softmax(1)[:, 0].contiguous(), (y == 0).float())
            self.log("error", self.error, on_step=False, on_epoch=True)
            return F.cross_entropy(out, y)

    eager = fit(tmp_path, Net, "off")
    captured = both(tmp_path, Net)
    assert captured.report.steps_replayed > 30
    assert eager.module.accuracy._update_count == captured.module.accuracy._update_count


def test_a_tensor_attribute_that_the_step_replaces_is_carried(tmp_path):
    class Net(Deterministic):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.kept = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            loss = F.cross_entropy(out, y)
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
            self.last = out
            return loss * (1 + self.mean)

        def on_train_epoch_end(self):
            self.kept.append(self.last.detach())

    runs = [fit(tmp_path, Net, capture) for capture in ("off", "graph")]
    assert runs[1].report.steps_replayed > 30
    assert torch.equal(*(run.module.mean for run in runs))
    assert all(map(torch.equal, *(run.module.kept for run in runs)))


def test_freezing_a_layer_makes_a_program_of_its_own(tmp_path):
    class Net(Deterministic):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch < 2)

    run = both(tmp_path, Net)
    assert len(run.report.programs) == 2
    assert run.report.steps_replayed > 30


def test_changing_dropout_makes_a_program_of_its_own(tmp_path):
    class Net(Classifier):
        def on_train_epoch_start(self):
            self.net[2].p = 0.2 if self.current_epoch < 2 else 0.5

    run = both(tmp_path, Net)
    assert len(run.report.programs) == 2
    assert run.report.steps_replayed > 30


def test_what_changes_between_steps_is_noticed_and_named(tmp_path):
    class Net(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.net[2].p *= 0.99

    run = both(tmp_path, Net)
    assert run.report.steps_replayed == 0
    assert "python-state" in codes(run)


def test_what_hooks_change_and_no_step_reads_costs_no_program(tmp_path):
    class Net(Deterministic):
        def __init__(self):
            super().__init__()
            self.seen, self.epochs = 0, []

        def on_train_batch_start(self, batch, batch_idx):
            self.seen += batch_idx

        def on_train_epoch_end(self):
            self.epochs.append(self.seen)

    run = both(tmp_path, Net)
    assert run.report.steps_replayed >= 39
    assert [program.captures for program in run.report.programs] == [1]


class ReadsWhatHooksChange(Deterministic):
    temperature, read = 1.0, "plain"

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.temperature = 1 + batch_idx // 4  # three values, four steps each

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.value()

    def value(self):
        return self.temperature


class ReadsThroughDict(ReadsWhatHooksChange):
    def value(self):
        return vars(self).get("temperature", 1.0)


class ReadsThroughObject(ReadsWhatHooksChange):
    def __init__(self):
        super().__init__()
        self.options = {"temperature": 1.0}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.options["temperature"] = 1 + batch_idx // 4

    def value(self):
        return self.options["temperature"]


class ReadsAfterBranch(ReadsWhatHooksChange):
    """One attribute decides whether another one is read."""

    warm = False

    def on_train_epoch_start(self):
        self.warm = self.current_epoch > 1

    def value(self):
        return self.temperature if self.warm else 1.0


@pytest.mark.parametrize(
    "module",
    [ReadsWhatHooksChange, ReadsThroughDict, ReadsThroughObject, ReadsAfterBranch],
    ids=lambda cls: cls.__name__,
)
def test_what_hooks_change_and_the_step_reads_is_part_of_the_key(tmp_path, module):
    run = both(tmp_path, module)
    assert run.report.steps_replayed > 10
    assert codes(run) == set()


def test_the_gradient_of_an_input_does_not_keep_a_step_from_being_captured(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x.requires_grad_()), y)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.square().sum(1).mean()

    assert both(tmp_path, Net).report.steps_replayed >= 39


def test_an_option_set_once_in_a_while_is_found_by_the_next_epochs_comparison(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            if UNSEEN.value == 2:
                self.optimizers().param_groups[0]["lr"] = 0.01
            return self.loss(batch)

        def on_train_epoch_start(self):
            UNSEEN.value = self.trainer.current_epoch

    assert "lr-replaced" in codes(both(tmp_path, Net))


def test_replacing_the_lr_between_steps_is_heeded_without_a_second_capture(tmp_path):
    class Halve(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.95

    class Net(Classifier):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    run = both(tmp_path, Net, callbacks=lambda: [Halve()])
    assert [program.captures for program in run.report.programs] == [1]
    assert run.report.steps_replayed > 30


def test_replacing_gradients_between_steps_is_heeded(tmp_path):
    class Swap(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            for parameter in module.parameters():
                parameter.grad = None if batch_idx % 4 == 0 else parameter.grad.clone() * 2

    run = both(tmp_path, Classifier, callbacks=lambda: [Swap()], accumulate_grad_batches=2, max_epochs=6)
    assert run.report.steps_replayed > 20


def test_what_no_watch_sees_is_found_by_the_next_epochs_comparison(tmp_path):
    class Net(Deterministic):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * UNSEEN.value

        def on_train_epoch_start(self):
            UNSEEN.value = 1.0 if self.current_epoch < 2 else 0.5

    run = both(tmp_path, Net)
    (program,) = run.report.programs
    assert "verification" in codes(run)
    assert "differs by up to" in program.verification
    assert program.replays > 10


def test_checkpointing_with_dropout_is_found_by_verification(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Net(Classifier):
        def loss(self, batch):
            x, y = batch
            return F.cross_entropy(checkpoint(self.net, x, use_reentrant=False), y)

    run = both(tmp_path, Net)
    assert run.report.steps_replayed <= 1
    assert codes(run) & {"verification", "untraceable"}


def test_an_untraceable_step_is_taken_back_and_run_eagerly(tmp_path, monkeypatch):
    def refuses(function):
        def run(*inputs):
            function(*inputs)
            raise RuntimeError("no such operation")

        return run

    class Net(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.1), nn.Linear(FEATURES, CLASSES))

    monkeypatch.setattr("zdtrain.capture.tape.make_fx", refuses)
    run = both(tmp_path, Net)
    assert run.report.steps_replayed == 0
    assert codes(run) == {"untraceable"}


def test_an_error_of_the_step_itself_reaches_the_user(tmp_path):
    class Net(Deterministic):
        calls = 0

        def training_step(self, batch, batch_idx):
            type(self).calls += 1
            if type(self).calls == 4:
                raise ZeroDivisionError("the user's own")
            return self.loss(batch)

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        fit(tmp_path, Net, "graph", loader=lambda: batches(3))
