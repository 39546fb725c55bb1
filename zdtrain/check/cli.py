"""``zdtrain check CONFIG.yaml``: run a few steps of what a config describes, on a simulated device."""

import argparse
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from zdtrain.check.api import check_configured
from zdtrain.check.findings import SEVERITIES
from zdtrain.check.formats import FORMATS
from zdtrain.check.hardware import has_gpu
from zdtrain.check.report import CheckReport
from zdtrain.cli.arguments import configs_first
from zdtrain.cli.training import TrainingCLI
from zdtrain.errors import ConfigError

EXIT_CLEAN, EXIT_FOUND, EXIT_USAGE = 0, 1, 2


class ConfiguredRun(TrainingCLI):
    """Reads a config as ``zdtrain fit`` does and makes the module and the data, but no Trainer and no run.

    Args:
        args: config files and flags, as for ``zdtrain fit``.
    """

    def __init__(self, args: list[str]) -> None:
        self.trainer_options: dict[str, Any] = {}
        super().__init__(["fit", *configs_first(args)])

    def instantiate_trainer(self, **kwargs: Any) -> Any:  # noqa: ARG002 - LightningCLI's signature
        """Keep what stock Lightning knows, and the scalars; a check runs under its own Trainer."""
        given = vars(self._get(self.config_init, "trainer"))
        known = {*inspect.signature(Trainer.__init__).parameters, "scalars"}
        options = {name: value for name, value in given.items() if name in known and value is not None}
        extra = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        self.trainer_options = {**options, "callbacks": [*_as_list(options.get("callbacks")), *extra]}

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: the check does."""


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zdtrain check",
        description="Run a few steps on a simulated GPU and report what would make a real one wait.",
        epilog="Other arguments are those of `zdtrain fit`. Exit status: 0 nothing found, 1 findings, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=4, help="training steps to run, at least 3 (default: 4)")
    parser.add_argument("--validation-steps", type=int, default=3, help="validation steps to run (default: 3)")
    parser.add_argument("--format", choices=list(FORMATS), default="text", help="output format (default: text)")
    parser.add_argument("--output", type=Path, help="write the report to this file instead of the terminal")
    parser.add_argument(
        "--fail-on",
        choices=[*SEVERITIES, "never"],
        default="error",
        help="mildest finding that makes the exit status 1 (default: error)",
    )
    parser.add_argument("--shapes", action="store_true", help="add the table of every intermediate tensor")
    parser.add_argument(
        "--device",
        choices=["shadow", "cuda"],
        default="shadow",
        help="cuda: also run on this machine's GPU and compare",
    )
    return parser


def _fails(report: CheckReport, fail_on: str) -> bool:
    if fail_on == "never":
        return False
    worst = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return bool(report.codes(*worst))


def _check(options: argparse.Namespace, config_args: list[str]) -> CheckReport:
    if not config_args:
        raise ConfigError("zdtrain check: name a config file: zdtrain check configs/digits.yaml")
    if options.device == "cuda" and not has_gpu():
        raise ConfigError("--device cuda: this machine has no GPU that torch can use; leave it out to simulate one")
    configured = ConfiguredRun(config_args)
    return check_configured(
        configured.model,
        configured.datamodule,
        num_steps=options.steps,
        num_validation_steps=options.validation_steps,
        trainer_options=configured.trainer_options,
        shapes=options.shapes,
        on_gpu=options.device == "cuda",
    )


def main(argv: list[str]) -> int:
    """Check what a config describes.

    Args:
        argv: arguments after ``zdtrain check``.

    Returns:
        0: nothing at or above ``--fail-on``; 1: something; 2: wrong usage.

    Raises:
        ConfigError: the config or an option cannot be used.
    """
    if os.getcwd() not in sys.path:  # class paths name modules of the working directory, as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        options, config_args = _parser().parse_known_args(argv)
        report = _check(options, config_args)
    except SystemExit as stop:  # argparse: help, or an error that it has printed
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    text = FORMATS[options.format](report)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")
    return EXIT_FOUND if _fails(report, options.fail_on) else EXIT_CLEAN
