import pytest
import yaml

from zdtrain.cli.arguments import _WholeNumberLoader, configs_first, whole_numbers
from zdtrain.errors import ConfigError
from zdtrain.suggest import did_you_mean


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a.yaml"], ["--config=a.yaml"]),
        (["a.yaml", "b.yaml"], ["--config=a.yaml", "--config=b.yaml"]),
        (["--x.y", "3", "a.yaml"], ["--config=a.yaml", "--x.y", "3"]),
        (["--x.y=3", "--config", "a.yaml"], ["--config=a.yaml", "--x.y=3"]),
        (["-c", "a.yaml", "--x", "-1", "b.yaml"], ["--config=a.yaml", "--config=b.yaml", "--x", "-1"]),
        (["--print_config", "a.yaml"], ["--config=a.yaml", "--print_config"]),
        (["a.yaml", "--x"], ["--config=a.yaml", "--x"]),
    ],
)
def test_config_files_come_first_wherever_they_stand(argv, expected):
    assert configs_first(argv) == expected


def test_an_option_without_dashes_is_refused_with_the_spelling_that_works():
    with pytest.raises(ConfigError, match=r"options start with dashes, --trainer\.max_epochs=3"):
        configs_first(["trainer.max_epochs=3"])


def test_whole_numbers_in_scientific_notation_are_written_out():
    assert whole_numbers(["--a=1e3", "--b", "2E+1", "--c=1e-4", "--d=1.5e3", "--name=run1e3"]) == [
        *("--a=1000", "--b", "20", "--c=1e-4", "--d=1.5e3", "--name=run1e3"),
    ]


def test_whole_number_yaml_keeps_every_other_scalar():
    text = "{a: 1e3, b: 1e-4, c: 1.5e3, d: 2026-03-28, e: 1E2, f: abc1e3, g: -2e1, h: 7, i: 1.0}"
    loaded = yaml.load(text, Loader=_WholeNumberLoader)
    expected = {
        "a": 1000,
        "b": 1e-4,
        "c": 1500.0,
        "d": "2026-03-28",
        "e": 100,
        "f": "abc1e3",
        "g": -20,
        "h": 7,
        "i": 1.0,
    }
    assert loaded == expected
    assert {key: type(value) for key, value in loaded.items()} == {key: type(value) for key, value in expected.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trainer.max_epoch", "; did you mean 'trainer.max_epochs'?"),
        ("max_epochs", "; did you mean 'trainer.max_epochs'?"),
        ("zzz", ""),
    ],
)
def test_the_nearest_known_name_is_suggested(name, expected):
    assert did_you_mean(name, ["trainer.max_epochs", "trainer.devices", "model"]) == expected
