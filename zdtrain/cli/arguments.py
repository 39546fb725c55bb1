"""What jsonargparse is spared: config files anywhere on the command line, numbers as people write them."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from jsonargparse import set_loader

from zdtrain.errors import ConfigError

WHOLE_NUMBER_MODE = "yaml_whole_numbers"
"""Parser mode in which ``1e3`` in a file is the integer 1000; an option declared as float still gets 1000.0."""

_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]+[eE]\+?[0-9]+")
_WITHOUT_VALUE = {"-h", "--help", "--print_config"}
_CONFIG_OPTIONS = {"-c", "--config"}


def configs_first(argv: list[str]) -> list[str]:
    """Move config files, positional or after ``--config``, to the front, so that flags win wherever they stand.

    Example::

        >>> configs_first(["--trainer.max_epochs", "3", "a.yaml", "--config=b.yaml"])
        ['--config=a.yaml', '--config=b.yaml', '--trainer.max_epochs', '3']

    Raises:
        ConfigError: a positional argument is an option without its dashes.
    """
    configs, flags = [], []
    arguments = iter(argv)
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            configs.append(_config_file(argument))
        elif option in _CONFIG_OPTIONS:
            configs.append(value if equals else next(arguments, ""))
        elif equals or option in _WITHOUT_VALUE:
            flags.append(argument)
        else:
            flags += [argument, *_next(arguments)]
    return [*(f"--config={config}" for config in configs), *flags]


def whole_numbers(argv: list[str]) -> list[str]:
    """Write ``1e3`` as ``1000`` wherever it is the whole value of an option."""
    return [_as_whole_number(argument) for argument in argv]


def _as_whole_number(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{int(float(value))}" if _WHOLE_NUMBER.fullmatch(value) else argument


def _config_file(argument: str) -> str:
    if "=" in argument and not Path(argument).exists():
        raise ConfigError(f"unexpected argument {argument!r}: options start with dashes, --{argument}")
    return argument


def _next(arguments: Iterator[str]) -> list[str]:
    value = next(arguments, None)
    return [] if value is None else [value]


class _WholeNumberLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which scientific notation is a number, a whole one an integer, and dates stay strings."""


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | int:
    value: float = loader.construct_yaml_float(node)
    return int(value) if _WHOLE_NUMBER.fullmatch(node.value) else value


_WholeNumberLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_WholeNumberLoader.add_constructor("tag:yaml.org,2002:float", _construct_number)
_WholeNumberLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
set_loader(
    WHOLE_NUMBER_MODE,
    lambda text: yaml.load(text, Loader=_WholeNumberLoader),
    exceptions=(yaml.YAMLError,),
)
