"""The Trainer shows stock Lightning's arguments and its own to whoever asks for them."""

import inspect

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from tests.parity.harness import QUIET, Net
from zdtrain import Trainer
from zdtrain.config import TrainerOptions
from zdtrain.errors import ConfigError

OWN = set(TrainerOptions.__dataclass_fields__)


def test_the_signature_is_stock_lightnings_followed_by_our_options():
    stock = inspect.signature(pl.Trainer).parameters
    ours = inspect.signature(Trainer).parameters
    assert list(ours)[: len(stock)] == list(stock)
    assert all(ours[name] == stock[name] for name in stock)
    assert set(ours) - set(stock) == OWN
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OWN)


def test_it_is_stock_lightnings_trainer_by_name_and_kind():
    assert issubclass(Trainer, pl.Trainer)
    assert Trainer.__name__ == "Trainer"


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="max_epoch"):
        Trainer(max_epoch=3)


def test_positional_arguments_are_refused_as_stock_refuses_them():
    with pytest.raises(TypeError, match="positional"):
        Trainer.__init__.__wrapped__(object(), "cpu")


def test_the_environment_gives_defaults_to_stock_arguments_and_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LIGHTNING_QUIRKS", "True")
    quiet = {name: value for name, value in QUIET.items() if name != "max_epochs"}
    trainer = Trainer(**quiet, logger=False, default_root_dir=tmp_path)
    assert trainer.max_epochs == 7
    assert trainer.options.lightning_quirks is True


def test_what_is_passed_wins_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LIGHTNING_QUIRKS", "True")
    options = {**QUIET, "max_epochs": 3, "logger": False, "default_root_dir": tmp_path}
    trainer = Trainer(**options, lightning_quirks=False)
    assert (trainer.max_epochs, trainer.options.lightning_quirks) == (3, False)


def test_a_bad_option_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_LIGHTNING_QUIRKS", "3")
    with pytest.raises(ConfigError, match=r"trainer\.lightning_quirks=3: use True or False"):
        Trainer(**QUIET)


def test_jsonargparse_sees_types_and_defaults_of_all_arguments():
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    values = parser.parse_args(["--trainer.max_epochs=3", "--trainer.lightning_quirks=true"]).trainer
    assert (values.max_epochs, values.lightning_quirks, values.accumulate_grad_batches) == (3, True, 1)
    assert set(vars(values)) >= set(inspect.signature(pl.Trainer).parameters) | OWN


def test_a_wrong_type_is_refused_by_jsonargparse(capsys):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    with pytest.raises(SystemExit):
        parser.parse_args(["--trainer.lightning_quirks=often"])
    assert "lightning_quirks" in capsys.readouterr().err


def test_lightning_cli_builds_it(tmp_path):
    arguments = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    arguments += ["--trainer.lightning_quirks=true", f"--trainer.default_root_dir={tmp_path}"]
    cli = LightningCLI(Net, trainer_class=Trainer, args=arguments, run=False, save_config_callback=None)
    assert type(cli.trainer) is Trainer
    assert cli.trainer.options.lightning_quirks
    assert cli.trainer.max_epochs == 1


def test_a_subclass_keeps_working(tmp_path):
    class Mine(Trainer):
        def __init__(self, extra=1, **kwargs):
            self.extra = extra
            super().__init__(**kwargs)

    trainer = Mine(extra=2, lightning_quirks=True, logger=False, default_root_dir=tmp_path, **QUIET)
    assert (trainer.extra, trainer.options.lightning_quirks) == (2, True)
    trainer.fit(Net())
    assert trainer.current_epoch == 2
