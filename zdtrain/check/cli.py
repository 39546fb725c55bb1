"""``zdtrain check CONFIG.yaml``: run a few steps of what a config describes, on a simulated device."""

import argparse
from pathlib import Path

from zdtrain.check.api import MIN_STEPS, check_configured
from zdtrain.check.findings import SEVERITIES
from zdtrain.check.formats import FORMATS
from zdtrain.check.hardware import has_gpu
from zdtrain.check.report import CheckReport
from zdtrain.cli.configured import ConfiguredRun
from zdtrain.errors import ConfigError
from zdtrain.parser import Parser, whole_number

EXIT_CLEAN, EXIT_FOUND, EXIT_USAGE = 0, 1, 2


def _parser() -> Parser:
    parser = Parser(
        prog="zdtrain check",
        description="Run a few steps on a simulated GPU and report what would make a real one wait.",
        epilog="Other arguments are those of `zdtrain fit`. Exit status: 0 nothing found, 1 findings, 2 wrong usage.",
    )
    parser.add_argument("--steps", type=whole_number(1), default=4, help="training steps, at least 3 (default: 4)")
    parser.add_argument("--validation-steps", type=whole_number(0), default=3, help="validation steps (default: 3)")
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


def _check(options: argparse.Namespace, config_args: list[str], own_options: list[str]) -> CheckReport:
    if not config_args:
        raise ConfigError("zdtrain check: name a config file: zdtrain check configs/digits.yaml")
    if options.steps < MIN_STEPS:
        raise ConfigError(
            f"zdtrain check: --steps {options.steps}: the first step fills caches and two more are compared; "
            f"give at least {MIN_STEPS}"
        )
    if options.device == "cuda" and not has_gpu():
        raise ConfigError("--device cuda: this machine has no GPU that torch can use; leave it out to simulate one")
    configured = ConfiguredRun(config_args, own_options)
    return check_configured(
        configured.model,
        configured.datamodule,
        num_steps=options.steps,
        num_validation_steps=options.validation_steps,
        trainer_options=configured.trainer_options,
        shapes=options.shapes,
        on_gpu=options.device == "cuda",
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"zdtrain check: --output {path}: {error.strerror or error}") from error


def main(argv: list[str]) -> int:
    """Check what a config describes.

    Args:
        argv: arguments after ``zdtrain check``.

    Returns:
        0: nothing at or above ``--fail-on``; 1: something; 2: wrong usage.

    Raises:
        ConfigError: the config or an option cannot be used.
    """
    parser = _parser()
    options, config_args = parser.parse_known_args(argv)
    report = _check(options, config_args, parser.option_names)
    text = FORMATS[options.format](report)
    if options.output is None:
        print(text)
    else:
        _write(options.output, text)
    return EXIT_FOUND if _fails(report, options.fail_on) else EXIT_CLEAN
