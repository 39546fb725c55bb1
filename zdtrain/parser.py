"""Options of commands that are not LightningCLI's: what is wrong is one line, with the nearest option or choice."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from zdtrain.errors import ConfigError
from zdtrain.suggest import did_you_mean


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises where argparse prints its usage and ends the process.

    Raises:
        ConfigError: From `parse` and `parse_known_args`, an option is unknown or its value cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> Any:
        """Return the options that `arguments` give."""
        options, rest = self.parse_known_args(arguments)
        if not rest:
            return options
        unknown = next((argument for argument in rest if argument.startswith("-")), None)
        if unknown is None:
            raise ConfigError(f"unexpected argument {rest[0]!r} ({self.prog} --help)")
        name = unknown.partition("=")[0]
        hint = did_you_mean(name, self._option_string_actions)
        raise ConfigError(f"unknown option {name!r}{hint or f' ({self.prog} --help lists all)'}")

    @property
    def option_names(self) -> list[str]:
        """Names of the options, without their dashes."""
        return [name.lstrip("-") for name in self._option_string_actions if name.startswith("--")]

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            hint = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(action, f"expected one of {', '.join(choices)}, got {value!r}{hint}")

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} ({self.prog} --help)")


def whole_number(least: int) -> Callable[[str], int]:
    """Return the `type` of an option that is a whole number, at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"use a whole number that is at least {least}, got {text!r}")
        return number

    return read
