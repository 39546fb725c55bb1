"""What a config file describes, made without a Trainer: for commands that run it in their own way."""

import inspect
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer

from zdtrain.cli.arguments import configs_first
from zdtrain.cli.training import TrainingCLI


class ConfiguredRun(TrainingCLI):
    """Reads a config as ``zdtrain fit`` does and makes the module and the data, but no Trainer and no run.

    Args:
        args: config files and flags, as for ``zdtrain fit``.
        own_options: options of the command itself, which a wrong one may have been meant for.
    """

    def __init__(self, args: list[str], own_options: Iterable[str] = ()) -> None:
        self.trainer_options: dict[str, Any] = {}
        self.own_options = tuple(own_options)
        super().__init__(["fit", *configs_first(args)])

    def instantiate_trainer(self, **kwargs: Any) -> Any:  # noqa: ARG002 - LightningCLI's signature
        """Keep what stock Lightning knows, and the scalars."""
        given = vars(self._get(self.config_init, "trainer"))
        known = {*inspect.signature(Trainer.__init__).parameters, "scalars"}
        options = {name: value for name, value in given.items() if name in known and value is not None}
        extra = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        self.trainer_options = {**options, "callbacks": [*_as_list(options.get("callbacks")), *extra]}

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
