"""`check_step`: what runs, what is counted, and what is refused."""

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.check.zoo.case import CLASSES, Base, batch
from zdtrain.check import check_step
from zdtrain.errors import ConfigError


def only(report, code: str):
    found = [finding for finding in report.findings if finding.code == code]
    assert len(found) == 1, report.findings
    return found[0]


class ReadsThreeTimes(Base):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for _ in range(3):
            loss.item()
        return loss


def test_reads_are_counted_per_step() -> None:
    report = check_step(ReadsThreeTimes(), batch(), num_steps=5)
    assert only(report, "host-read").count == 3
    assert report.host_reads_per_step == 3
    assert report.stages[0].num_steps == 5


def test_reads_in_each_accumulated_batch_are_counted_per_batch() -> None:
    report = check_step(ReadsThreeTimes(), batch(), trainer_options={"accumulate_grad_batches": 2})
    assert report.host_reads_per_step == 3
    assert report.stages[0].num_steps == 8


def test_read_of_every_other_step_counts_half() -> None:
    class EveryOther(Base):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx % 2:
                loss.item()
            return loss

    report = check_step(EveryOther(), batch(), num_steps=5)
    assert only(report, "host-read").count == 0.5


def test_read_inside_a_library_names_the_users_line_and_the_library() -> None:
    class Updates(Base):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric(nan_strategy=0.0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            return loss

    finding = only(check_step(Updates(), batch()), "library-host-read")
    assert finding.file == __file__
    assert str(finding.function).endswith("Updates.training_step")
    assert finding.library is not None
    assert finding.library.startswith("torchmetrics.aggregation.")
    assert "self.mean.update(loss.detach())" in finding.message


def test_message_quotes_the_expression_that_reads() -> None:
    class Compares(Base):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if (loss < 100.0 and batch is not None) else loss * 0.5

    assert only(check_step(Compares(), batch()), "implicit-host-read").message.startswith("`loss < 100.0`")


def test_the_module_and_all_randomness_stay_as_they_were() -> None:
    module = Base()
    weights = copy.deepcopy(module.state_dict())
    attributes = set(vars(module))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    check_step(module, batch())
    drawn = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert drawn == (torch.rand(()), random.random(), np.random.rand())
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert set(vars(module)) == attributes
    assert module.net[0].weight.device.type == "cpu"


def test_a_module_that_is_not_copied_is_given_back_on_the_cpu() -> None:
    module = Base()
    before = module.net[0].weight.detach().clone()
    check_step(module, batch(), copy_module=False)
    assert type(module.net[0].weight) is nn.Parameter
    assert module.net[0].weight.device.type == "cpu"
    assert not torch.equal(module.net[0].weight, before)
    assert "training_step" not in vars(module)


def test_plain_module_with_a_step_function() -> None:
    def step(module: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(module(x), y)
        loss.item()
        return loss

    report = check_step(Base().net, batch(), step=step, make_optimizer=torch.optim.AdamW)
    assert only(report, "host-read").file == __file__
    assert report.codes() == {"host-read"}


def test_data_module_with_batches_of_different_sizes() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            x, y = batch(30)
            return DataLoader(TensorDataset(x, y), batch_size=8)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(*batch(8)), batch_size=4)

    class Validates(Base):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    report = check_step(Validates(), datamodule=Data())
    assert report.codes() == set()
    assert [(stage.name, stage.num_steps) for stage in report.stages] == [("train", 4), ("validation", 2)]


@pytest.mark.parametrize(
    "options",
    [{"pin_memory": True}, {"num_workers": 1, "pin_memory": True, "persistent_workers": True}],
    ids=["pinned", "worker"],
)
def test_loaders_with_pinned_memory_and_workers(options: dict[str, Any]) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(*batch(32)), batch_size=8, **options)

    assert check_step(Base(), datamodule=Data()).codes() == set()


def test_compiled_parts_are_looked_into() -> None:
    class Compiled(Base):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.scaled(x))

        @torch.compile
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5 if x.sum() > 1e9 else x

    report = check_step(Compiled(), batch())
    assert report.codes() == {"implicit-host-read"}
    assert "x.sum() > 1e9" in report.findings[0].message


def test_saved_hyperparameters_and_installed_objects_are_not_state_of_the_step() -> None:
    class Keeps(Base):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.logger_of_mine = logging.getLogger("mine")
            self.table = np.zeros(10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.logger_of_mine.debug("a step")
            return super().training_step(batch, batch_idx)

    assert check_step(Keeps(torch.ones(4)), batch()).codes() == set()


def test_array_changed_by_the_step_is_state() -> None:
    class Counts(Base):
        def __init__(self) -> None:
            super().__init__()
            self.table = np.zeros(10)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.table[0] += 1
            return super().training_step(batch, batch_idx)

    finding = only(check_step(Counts(), batch()), "python-state")
    assert finding.message == "the step changes `table`"


def test_several_shapes_are_compared_only_with_their_like() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader([batch(size) for size in (4, 8, 4, 8, 4, 8)], batch_size=None)

    assert check_step(Base(), datamodule=Data(), num_steps=6).codes() == set()


def test_outputs_collected_for_the_end_of_the_epoch_are_found_although_they_are_cleared() -> None:
    class Collects(Base):
        def __init__(self) -> None:
            super().__init__()
            self.train_outputs, self.val_outputs = [], []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.train_outputs.append(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            self.train_outputs.clear()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_outputs.append(self(batch[0]))

        def on_validation_epoch_end(self) -> None:
            self.val_outputs.clear()

    report = check_step(Collects(), batch())
    assert [(f.code, f.stage, f.message) for f in report.findings] == [
        ("kept-tensor", "train", "the step adds tensors to `train_outputs`"),
        ("kept-tensor", "validation", "the step adds tensors to `val_outputs`"),
    ]
    assert [stage.verdict for stage in report.stages] == ["capturable with changes"] * 2


def test_losses_kept_in_a_global_list_are_found() -> None:
    kept = []

    class Keeps(Base):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            kept.append(loss * 1.0)
            return loss

    finding = only(check_step(Keeps(), batch()), "kept-graph")
    assert finding.message.startswith("something holds results of aten.mul.Tensor")
    assert finding.file == __file__


def test_steps_that_cannot_be_compared_are_remarked() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader([batch(size) for size in (4, 5, 6, 7)], batch_size=None)

    report = check_step(Base(), datamodule=Data())
    assert len(report.remarks) == 1
    assert report.remarks[0].startswith("train: no two steps could be compared (each has inputs of other shapes)")
    assert check_step(Base(), batch()).remarks == ()


def test_an_empty_loader_is_refused() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader([], batch_size=None)

    with pytest.raises(ConfigError, match="the training loader gave no batch"):
        check_step(Base(), datamodule=Data())


def test_host_work_in_on_after_batch_transfer_is_outside_the_step() -> None:
    class Augments(Base):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return x * float(x.std()), y

    report = check_step(Augments(), batch())
    finding = only(report, "host-read")
    assert (finding.hook, finding.in_step) == ("on_after_batch_transfer", False)
    assert report.verdict == "capturable"
    assert report.host_reads_per_step == 1


def test_callbacks_run_and_those_that_zdtrain_serves_do_not() -> None:
    class Nosy(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            outputs["loss"].item()

    report = check_step(
        Base(), batch(), trainer_options={"callbacks": [Nosy(), EarlyStopping("loss"), ModelCheckpoint()]}
    )
    finding = only(report, "host-read")
    assert finding.hook == "on_train_batch_end"
    assert not finding.in_step
    assert report.verdict == "capturable"
    assert report.host_reads_per_step == 1
    assert report.skipped_callbacks == ("EarlyStopping", "ModelCheckpoint")


def test_callback_of_lightning_that_reads_is_named() -> None:
    report = check_step(Base(), batch(), trainer_options={"callbacks": [EMAWeightAveraging()]})
    assert report.codes() == {"library-host-read"}
    assert all(str(finding.library).startswith("torch.optim.swa_utils.") for finding in report.findings)
    assert all(finding.file is None for finding in report.findings)
    assert report.host_reads_per_step == 2
    assert report.verdict == "capturable"


def test_several_findings_are_reported_in_one_run() -> None:
    class Many(Base):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.offset = torch.zeros(8)
            self.unused = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            self.calls += 1
            loss = F.cross_entropy(self(x + self.offset), y)
            print(loss, end="")
            loss.item()
            return loss[None][loss[None] > 0].sum()

    report = check_step(Many(), batch())
    assert report.codes() == {
        *("python-state", "plain-tensor", "cpu-tensor", "unused-parameter"),
        *("implicit-host-read", "host-read", "data-dependent-shape"),
    }
    reasons = {reason.code for reason in report.stages[0].fallbacks}
    assert reasons == {"python-state", "cpu-tensor", "implicit-host-read", "host-read", "data-dependent-shape"}
    assert all(reason.line is not None for reason in report.stages[0].fallbacks)


def test_what_ran_before_an_exception_is_reported() -> None:
    class Breaks(Base):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            if batch_idx == 2:
                raise KeyError("missing")
            return loss

    report = check_step(Breaks(), batch())
    assert {"step-raised", "host-read"} <= report.codes()
    raised = only(report, "step-raised")
    assert raised.file == __file__
    assert raised.message == "KeyError: 'missing'"
    assert report.verdict == "not capturable"


def test_the_same_line_is_found_in_training_and_in_validation() -> None:
    class Both(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            out.sum().item()
            return out

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0])

    report = check_step(Both(), batch())
    assert [(finding.stage, finding.count) for finding in report.findings] == [("train", 1), ("validation", 1)]
    assert [stage.verdict for stage in report.stages] == ["capturable with changes"] * 2


def test_gradient_assigned_by_hand_counts_as_gradient() -> None:
    class ByHand(Base):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            parameters = list(self.net.parameters())
            loss = F.cross_entropy(self(batch[0]), batch[1])
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            optimizer.step()

    assert check_step(ByHand(), batch()).codes() == set()


def test_unused_in_one_step_only_is_not_unused() -> None:
    class Alternates(Base):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            head = self.net if batch_idx % 2 else self.other
            return F.cross_entropy(head(batch[0]), batch[1])

    assert "unused-parameter" not in check_step(Alternates(), batch()).codes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 2}, "num_steps must be at least 3, got 2"),
        ({"step": lambda module, batch: batch}, "step= and make_optimizer= are for a plain nn.Module"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_step(Base(), batch(), **arguments)


def test_plain_module_needs_a_step() -> None:
    with pytest.raises(ConfigError, match=r"Linear is a plain nn.Module; pass step="):
        check_step(nn.Linear(8, 4), batch())


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be an nn\.Module, got function"):
        check_step(lambda x: x, batch())


def test_module_that_cannot_be_copied_is_refused_with_the_remedy() -> None:
    module = Base()
    module.derived = module.net[0].weight * 2
    with pytest.raises(ConfigError, match="copy_module=False"):
        check_step(module, batch())
