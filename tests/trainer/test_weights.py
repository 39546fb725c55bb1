"""What a checkpoint and a module do not have in common is named, and left as it was where that is accepted."""

import json
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zdtrain
from zdtrain.errors import ConfigError
from zdtrain.weights import WeightsError, WeightsWarning, load_weights


class Net(pl.LightningModule):
    def __init__(self, **parts):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.head(self.backbone(batch[0])).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)

    val_dataloader = train_dataloader


class Renamed(Net):
    """The head has another name and another sibling."""

    def __init__(self):
        super().__init__(classifier_head=nn.Linear(4, 2), scale=nn.Parameter(torch.ones(3)))
        del self.head

    def training_step(self, batch, batch_idx):
        return self.classifier_head(self.backbone(batch[0])).square().mean() * self.scale.sum()


def options(**changes):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return {"accelerator": "cpu", "max_epochs": 1, "logger": False, "num_sanity_val_steps": 0, **quiet, **changes}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    trainer = zdtrain.Trainer(**options())
    trainer.fit(Net())
    path = tmp_path_factory.mktemp("run") / "net.ckpt"
    trainer.save_checkpoint(path)
    return path


def state_in(path):
    return torch.load(path, weights_only=True)["state_dict"]


def test_every_tensor_that_fits_is_loaded(checkpoint):
    module = Net()
    report = load_weights(module, checkpoint)
    assert report.is_complete
    assert set(report.loaded) == set(state_in(checkpoint))
    for name, value in state_in(checkpoint).items():
        assert torch.equal(module.state_dict()[name], value), name


def test_what_is_only_on_one_side_is_named_and_new_parameters_keep_their_initial_values(checkpoint):
    module = Renamed()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    report = load_weights(module, checkpoint, strict=False)
    assert set(report.fresh) == {"scale", "classifier_head.weight", "classifier_head.bias"}
    assert set(report.unused) == {"head.weight", "head.bias"}
    assert set(report.renamed) == {
        ("head.weight", "classifier_head.weight"),
        ("head.bias", "classifier_head.bias"),
    }
    for name in report.fresh:
        assert torch.equal(module.state_dict()[name], initial[name])
    for name in report.loaded:
        assert torch.equal(module.state_dict()[name], state_in(checkpoint)[name])
    assert "scale" in str(report)
    assert "head.bias -> classifier_head.bias" in str(report)


def test_a_tensor_of_another_shape_keeps_its_initial_values_and_is_named_with_both_shapes(checkpoint):
    module = Net(head=nn.Linear(4, 7))
    initial = module.head.weight.clone()
    report = load_weights(module, checkpoint, strict=False)
    assert report.reshaped == (("head.weight", (2, 4), (7, 4)), ("head.bias", (2,), (7,)))
    assert "head.weight [2, 4], here [7, 4]" in str(report)
    assert torch.equal(module.head.weight, initial)
    assert torch.equal(module.backbone[0].weight, state_in(checkpoint)["backbone.0.weight"])


@pytest.mark.parametrize("module", [Renamed, lambda: Net(head=nn.Linear(4, 7))])
def test_a_strict_load_names_what_does_not_fit(checkpoint, module):
    with pytest.raises(WeightsError, match=r"net\.ckpt does not fit .*head.*strict=False accepts that") as caught:
        load_weights(module(), checkpoint)
    assert not caught.value.report.is_complete


def test_a_part_of_a_module_takes_the_names_behind_a_prefix(checkpoint):
    part = nn.Linear(4, 2)
    assert load_weights(part, checkpoint, prefix="head.").loaded == ("weight", "bias")
    assert torch.equal(part.weight, state_in(checkpoint)["head.weight"])
    with pytest.raises(ConfigError, match=r"prefix='tail\.': no name in .* begins with it, they are backbone"):
        load_weights(part, checkpoint, prefix="tail.")


def test_a_plain_state_dict_is_a_checkpoint_too(tmp_path):
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    assert load_weights(target, tmp_path / "plain.pt").is_complete
    assert torch.equal(target.weight, source.weight)


class Hparams:
    """Something that is neither a tensor nor a plain value."""


def test_a_file_that_runs_code_is_read_only_where_it_is_trusted(tmp_path):
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"state_dict": source.state_dict(), "hyper_parameters": Hparams()}, tmp_path / "own.ckpt")
    with pytest.raises(ConfigError, match="if you trust where it comes from, pass weights_only=False"):
        load_weights(target, tmp_path / "own.ckpt")
    assert load_weights(target, tmp_path / "own.ckpt", weights_only=False).is_complete


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.ckpt'?: there is no such file"):
        load_weights(nn.Linear(1, 1), tmp_path / "missing.ckpt")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    for trusted in (False, True):
        with pytest.raises(ConfigError, match=r"text\.ckpt'?: this is no checkpoint"):
            load_weights(nn.Linear(1, 1), tmp_path / "text.ckpt", weights_only=not trusted)
    torch.save({"numbers": [1, 2]}, tmp_path / "numbers.pt")
    with pytest.raises(ConfigError, match=r"numbers\.pt'?: this file holds no state dict"):
        load_weights(nn.Linear(1, 1), tmp_path / "numbers.pt")


class Migrates(nn.Linear):
    """Reads what an older version of it called `kernel`."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_reads_old_names_has_nothing_missing(tmp_path):
    module = Migrates(2, 2)
    torch.save({"kernel": torch.eye(2), "bias": torch.zeros(2)}, tmp_path / "old.pt")
    report = load_weights(module, tmp_path / "old.pt")
    assert set(report.loaded) == {"weight", "bias"}
    assert torch.equal(module.weight, torch.eye(2))


def test_lazy_modules_take_their_shapes_from_the_checkpoint(checkpoint):
    module = Net(head=nn.LazyLinear(2))
    assert load_weights(module, checkpoint).is_complete
    assert module.head.weight.shape == (2, 4)


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_run_says_what_strict_loading_off_leaves_as_it_was(checkpoint, run, tmp_path):
    module = Net(extra=nn.Linear(2, 2))
    module.strict_loading = False
    module.configure_optimizers = lambda: torch.optim.Adam([*module.backbone.parameters(), *module.head.parameters()])
    trainer = zdtrain.Trainer(**options(max_epochs=2, records=tmp_path))
    named = "weights are|extra.weight, extra.bias"
    with pytest.warns(
        WeightsWarning, match=rf"net\.ckpt: 9 of 11 tensors loaded; not in the checkpoint.*{named}"
    ) as said:
        getattr(trainer, run)(module, ckpt_path=checkpoint)
    by_position = "the optimizer's state is taken over by position"
    assert (by_position in str(said[0].message)) == (run == "fit")
    (event,) = [e for e in events_of(trainer) if e["kind"] == "weights"]
    assert event["fresh"] == ["extra.weight", "extra.bias"]
    assert event["unused"] == []


def events_of(trainer):
    return [json.loads(line) for line in (trainer.recorder.folder / "events.jsonl").read_text().splitlines()]


def test_a_strict_run_ends_with_torchs_error_and_a_note_that_helps(checkpoint):
    errors = []
    for trainer_class in (pl.Trainer, zdtrain.Trainer):
        with pytest.raises(RuntimeError, match="Missing key") as caught:
            trainer_class(**options(max_epochs=2)).fit(Renamed(), ckpt_path=checkpoint)
        errors.append(caught.value)
    stock, ours = errors
    assert (type(ours), str(ours)) == (type(stock), str(stock))
    (note,) = ours.__notes__
    assert "perhaps renamed: head.weight -> classifier_head.weight" in note
    assert "load_weights(module, path, strict=False)" in note
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        zdtrain.Trainer(**options()).validate(Renamed(), ckpt_path=checkpoint)
    assert "set strict_loading = False on the module" in caught.value.__notes__[0]


def test_an_optimizer_with_other_parameters_ends_the_run_with_a_note_that_helps(checkpoint):
    module = Net(extra=nn.Linear(2, 2))
    module.strict_loading = False
    with (
        pytest.warns(WeightsWarning, match="extra"),
        pytest.raises(ValueError, match="doesn't match the size of optimizer's group") as caught,
    ):
        zdtrain.Trainer(**options(max_epochs=2)).fit(module, ckpt_path=checkpoint)
    assert "to leave its state behind, load_weights(module, path, strict=False)" in caught.value.__notes__[0]


def test_what_the_note_advises_trains_the_new_parameters(checkpoint):
    module = Net(extra=nn.Linear(2, 2))
    load_weights(module, checkpoint, strict=False)
    trainer = zdtrain.Trainer(**options())
    trainer.fit(module)
    assert trainer.global_step == 2


def test_a_checkpoint_that_fits_gives_no_warning(checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("error", WeightsWarning)
        zdtrain.Trainer(**options(max_epochs=2)).fit(Net(), ckpt_path=checkpoint)


def test_a_checkpoint_of_a_device_that_is_not_here_is_read_everywhere(tmp_path, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save = ModelCheckpoint(tmp_path, filename="far")
    trainer = zdtrain.Trainer(
        **options(enable_checkpointing=True, callbacks=[save], ema_decay=0.9, nonfinite="skip", scalars={"alpha": 0.5})
    )
    trainer.fit(Net())
    monkeypatch.undo()
    path = tmp_path / "far.ckpt"
    with pytest.raises(RuntimeError, match="CUDA"):  # the file does say that it was saved elsewhere
        torch.load(path, weights_only=True)
    weights = trainer.lightning_module.state_dict()
    alone = Net()
    assert load_weights(alone, path).is_complete
    again = Net()
    zdtrain.Trainer(**options(max_epochs=1, ema_decay=0.9, nonfinite="skip", scalars={"alpha": 0.0})).fit(
        again, ckpt_path=path
    )
    for module in (alone, again, Net.load_from_checkpoint(path)):
        assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    pl.Trainer(**options()).validate(Net(), ckpt_path=path)
