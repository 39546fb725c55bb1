"""`zdtrain export`: the trained module of a config and a checkpoint as a file that torch alone runs."""

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils import _pytree as pytree

from zdtrain.cli import EXIT_OK
from zdtrain.cli.configured import ConfiguredRun
from zdtrain.errors import ConfigError
from zdtrain.export import export_module
from zdtrain.parser import Parser
from zdtrain.quiet import quiet
from zdtrain.weights import WeightsError, load_weights

_LOADERS = {"predict_dataloader": "predict", "val_dataloader": "validate", "train_dataloader": "fit"}
"""Where example inputs come from, the first that there is, and the stage to set up for it."""


def _parser() -> Parser:
    parser = Parser(
        prog="zdtrain export",
        description="Export the forward of a trained module with torch.export, and compare it with the module.",
        epilog="Other arguments are those of `zdtrain fit`.",
    )
    parser.add_argument("--ckpt_path", metavar="FILE", help="the checkpoint with the weights")
    parser.add_argument("--untrained", action="store_true", help="export the initial weights, without a checkpoint")
    parser.add_argument("-o", "--output", default="model.pt2", metavar="FILE", help="the file (default: model.pt2)")
    parser.add_argument("--static_batch", action="store_true", help="keep the batch size of the example inputs")
    return parser


def main(argv: list[str]) -> int:
    """Export what a config describes.

    Raises:
        ConfigError: the config, the checkpoint or an option cannot be used.
        ExportError: the module cannot be exported.
    """
    parser = _parser()
    options, config_args = parser.parse_known_args(argv)
    _check(options, config_args)
    checkpoint = f"--ckpt_path={options.ckpt_path or 'null'}"  # of the command; that of the config began another run
    configured = ConfiguredRun([*config_args, checkpoint], parser.option_names)
    module: LightningModule = configured.model
    module.configure_model()
    args, kwargs, chosen = _example(module, configured.datamodule)
    if options.ckpt_path:
        try:
            load_weights(module, options.ckpt_path)
        except WeightsError as error:
            raise ConfigError(
                f"--ckpt_path {options.ckpt_path} does not fit {type(module).__name__}: {error.report}"
            ) from error
    weights = options.ckpt_path or "initial weights"
    print(f"{type(module).__name__} with {weights}, example inputs: {chosen}", flush=True)
    print(export_module(module, options.output, args, example_kwargs=kwargs, dynamic_batch=not options.static_batch))
    return EXIT_OK


def _check(options: argparse.Namespace, config_args: list[str]) -> None:
    if not config_args:
        raise ConfigError("zdtrain export: name a config file: zdtrain export configs/digits.yaml --ckpt_path FILE")
    if options.untrained and options.ckpt_path:
        raise ConfigError("--untrained exports initial weights: leave it out to export those of --ckpt_path")
    if not options.untrained and not options.ckpt_path:
        raise ConfigError("zdtrain export: name the weights with --ckpt_path FILE, or give --untrained to have none")


def _example(module: LightningModule, data: LightningDataModule | None) -> tuple[Any, dict[str, Any] | None, str]:
    """Return positional and keyword arguments of the module's forward, and where they are from in words."""
    if module.example_input_array is not None:
        return None, None, "example_input_array of the module"
    for hook, stage in _LOADERS.items():
        source = next((each for each in (data, module) if each is not None and is_overridden(hook, each)), None)
        if source is not None:
            args, kwargs, names = _arguments(module, _first_batch(source, hook, stage))
            return args, kwargs, f"{', '.join(names)} from the first batch of {type(source).__name__}.{hook}"
    raise ConfigError(f"no data to take example inputs from: set example_input_array in {type(module).__name__}")


def _first_batch(source: LightningDataModule | LightningModule, hook: str, stage: str) -> Any:
    try:
        with quiet():
            source.prepare_data()
            source.setup(stage)
            loader = pytree.tree_leaves(getattr(source, hook)())[0]  # the first of several
            return next(iter(loader))
    except Exception as error:  # whatever the user's code raises, or StopIteration
        raise ConfigError(
            f"{type(source).__name__}.{hook} gave no batch to take example inputs from ({type(error).__name__}: "
            f"{error}): set example_input_array in the module"
        ) from error


def _arguments(module: LightningModule, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """Return what forward takes of a batch, as positional and keyword arguments, and its names."""
    parameters = inspect.signature(module.forward).parameters.values()
    if isinstance(batch, Mapping):
        by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        kwargs = {
            name: batch[name] for name in (batch if takes_all else [each.name for each in by_name]) if name in batch
        }
        if kwargs and all(each.name in kwargs for each in by_name if each.default is each.empty):
            return (), kwargs, list(kwargs)
    positional = [each for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    taken = [each.name for each in positional if each.default is each.empty] or [each.name for each in positional[:1]]
    if isinstance(batch, tuple | list) and taken != ["batch"]:
        return tuple(batch[: len(taken)]), {}, taken
    return (batch,), {}, taken[:1]
