"""`zdtrain fit`, `validate`, `test` and `predict`: LightningCLI with our Trainer and a run folder."""

import json
import os
import sys
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from zdtrain.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, report_error
from zdtrain.cli.arguments import WHOLE_NUMBER_MODE, configs_first, whole_numbers
from zdtrain.cli.explain import explain
from zdtrain.errors import ConfigError, ZDTrainWarning
from zdtrain.monitors import Monitor, Statistics
from zdtrain.records import RecordError
from zdtrain.records.recorder import RunRecorder, find_recorder, recorder_for
from zdtrain.suggest import did_you_mean
from zdtrain.trainer import Trainer

EXIT_TERMINATED = 143  # 128 + SIGTERM

_NAMED_CLASSES = (LightningModule, LightningDataModule, Callback, Logger, Optimizer, LRScheduler, Monitor, Statistics)
_NO_FILES = ("best", "last", "hpc", "registry")  # what Lightning takes for a checkpoint besides a path
_PARSER_OPTIONS = {"exit_on_error": False, "allow_abbrev": False}


def fit(argv: list[str]) -> int:
    """Train: ``zdtrain fit CONFIG.yaml [--trainer.max_epochs 3 …]``."""
    return _run("fit", argv)


def validate(argv: list[str]) -> int:
    """Run validation once: ``zdtrain validate CONFIG.yaml --ckpt_path FILE``."""
    return _run("validate", argv)


def test(argv: list[str]) -> int:
    """Run the test set once: ``zdtrain test CONFIG.yaml --ckpt_path FILE``."""
    return _run("test", argv)


def predict(argv: list[str]) -> int:
    """Predict: ``zdtrain predict CONFIG.yaml --ckpt_path FILE``."""
    return _run("predict", argv)


def _run(subcommand: str, argv: list[str]) -> int:
    try:
        with one_line_warnings():
            TrainingCLI([subcommand, *configs_first(argv)])
    except (ConfigError, RecordError):
        raise
    except MisconfigurationException as error:
        return report_error(error, EXIT_USAGE)
    except SIGTERMException:
        return EXIT_TERMINATED
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning ends an interrupted run with exit code 1
            return EXIT_INTERRUPTED
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        if not notes:  # nobody recorded where it happened
            traceback.print_exception(error)
        return report_error(error, EXIT_FAILED, note="".join(f" ({note})" for note in notes))
    return EXIT_OK


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show warnings of ours as one line each, without the place in our source that gave them."""
    formatted = warnings.formatwarning

    def one_line(message: Any, category: type[Warning], *place: Any, **options: Any) -> str:
        if not issubclass(category, ZDTrainWarning):
            return formatted(message, category, *place, **options)
        return f"zdtrain: warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = formatted


class TrainingCLI(LightningCLI):
    """LightningCLI that records a run folder and explains what it refuses.

    Args:
        args: Subcommand, then ``--config=FILE`` options, then flags.

    Raises:
        ConfigError: The configuration names an unknown option or has a value that cannot be used.
    """

    own_options: tuple[str, ...] = ()
    """Options of the command itself, which a wrong one may have been meant for."""

    def __init__(self, args: list[str]) -> None:
        if os.getcwd() not in sys.path:  # class paths name modules of the working directory, as with `python -m`
            sys.path.insert(0, os.getcwd())
        super().__init__(
            trainer_class=Trainer,
            trainer_defaults={"records": True},
            save_config_callback=RecordConfigCallback,
            parser_kwargs={
                "prog": "zdtrain",
                **_PARSER_OPTIONS,
                **{subcommand: dict(_PARSER_OPTIONS) for subcommand in self.subcommands()},
            },
            args=args,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str | None, help="Name of the run folder; default: that of the config file.")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            self.config = self._parse_whole_numbers(parser, args, error)
        config = self.config[self.config.subcommand]
        if config.name is None:
            config.name = Path(str(config.config[-1])).stem if config.get("config") else self.config.subcommand

    def _parse_whole_numbers(self, parser: LightningArgumentParser, args: list[str], first_error: ArgumentError) -> Any:
        """Parse again with ``1e3`` as an integer; what is refused both ways is explained as it was refused first."""
        mode = parser.parser_mode
        parser.parser_mode = WHOLE_NUMBER_MODE
        try:
            return parser.parse_args(whole_numbers(args))
        except ArgumentError:
            raise ConfigError(self._explain(first_error, args[0])) from first_error
        finally:
            parser.parser_mode = mode

    def _explain(self, error: ArgumentError, subcommand: str) -> str:
        return explain(str(error), self._subcommand_parsers[subcommand], _NAMED_CLASSES, self.own_options)

    @override
    def _parse_ckpt_path(self) -> None:
        """Let the hyperparameters of a checkpoint complete the configuration; refuse what is no checkpoint."""
        path = str(self.config[self.config.subcommand].get("ckpt_path") or "")
        if path and "://" not in path and not path.startswith(_NO_FILES) and not Path(path).exists():
            hint = did_you_mean(Path(path).name, [beside.name for beside in Path(path).parent.glob("*")])
            raise ConfigError(f"ckpt_path: no file {path}{hint}")
        try:
            super()._parse_ckpt_path()
        except ArgumentError as error:
            what = self._explain(error, self.config.subcommand)
            raise ConfigError(f"ckpt_path {path} is of another model: {what}") from error
        except Exception as error:  # whatever unpickling raises
            reason = next(iter(str(error).splitlines()), "")
            raise ConfigError(f"ckpt_path {path} cannot be read: {type(error).__name__}: {reason}") from error

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ConfigError(str(_innermost(error))) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        config = self._get(self.config_init, "trainer")
        recorder = recorder_for(config.records, config.default_root_dir, name=self._get(self.config, "name"))
        return super().instantiate_trainer(records=recorder or False, **kwargs)

    @rank_zero_only
    def after_fit(self) -> None:
        """Print the final metrics and where the run is recorded."""
        for name, value in sorted(self.trainer.callback_metrics.items()):
            print(f"{name} {float(value):.6g}")
        print_run_folder(find_recorder(self.trainer.loggers))


def _innermost(error: BaseException) -> BaseException:
    """The error that started it: jsonargparse wraps what a constructor raises in a description of types."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def print_run_folder(recorder: RunRecorder | None) -> None:
    """Say where the run is recorded, if it is."""
    if recorder is not None and recorder.folder is not None:
        print(f"run folder: {recorder.folder}", flush=True)


class RecordConfigCallback(SaveConfigCallback):
    """Puts the resolved configuration into the run folder; without one, where stock Lightning puts it."""

    @override
    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        recorder = find_recorder(trainer.loggers)
        if recorder is None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)
        elif trainer.is_global_zero and not self.already_saved:
            self.already_saved = True
            recorder.record_config(self.parser.dump(self.config, skip_none=False))
            config = json.loads(self.parser.dump(self.config, format="json"))
            sections = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler")
            recorder.log_hyperparams({key: config[key] for key in sections if config.get(key) is not None})
            print_run_folder(recorder)
