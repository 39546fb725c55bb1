"""Options of commands that are not LightningCLI's: what is wrong is one line, with the nearest option."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import override

from zdtrain.cli.suggest import did_you_mean
from zdtrain.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that raises where argparse prints its usage and ends the process.

    Raises:
        ConfigError: From `parse`, an option is unknown or its value cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> Any:
        """Return the options that `arguments` give."""
        options, rest = self.parse_known_args(arguments)
        if rest:
            unknown = next((argument for argument in rest if argument.startswith("-")), rest[0]).partition("=")[0]
            hint = did_you_mean(unknown, self._option_string_actions)
            raise ConfigError(f"unknown option {unknown!r}{hint or f' ({self.prog} --help lists all)'}")
        return options

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help)")
