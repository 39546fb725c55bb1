"""From a module to a file that torch alone runs, kept if it computes what the module does."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zdtrain.errors import ConfigError
from zdtrain.export.examples import examples_of
from zdtrain.export.parity import compare
from zdtrain.export.program import copy_of, refuse_tensors_of, traced
from zdtrain.export.refusals import hushed, summary_of
from zdtrain.export.types import ExportError, ExportReport
from zdtrain.source.location import claim


def export_module(
    module: nn.Module,
    path: str | Path,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_batch: bool = True,
) -> ExportReport:
    """Export `module.forward` in eval mode with ``torch.export`` and prove that the file computes the same.

    A copy on the CPU is exported: the module keeps its mode, device, hooks and trainer, and random numbers go on as if
    nothing had happened. The file is loaded again and compared with the module, output by output: same structure,
    dtypes and shapes, and values within the tolerances of ``torch.testing.assert_close``, a NaN being equal to a NaN.
    It is compared on the examples and on rows of theirs at other batch sizes; with ``dynamic_batch=False`` on their
    rows in reverse order. Only then is it put at `path`, where a file that was there is replaced.

    ::

        report = export_module(module, "model.pt2", torch.randn(8, 64))     # shape=(batch, features)
        torch.export.load("model.pt2").module()(torch.randn(3, 64))         # needs torch only

    Args:
        module: A LightningModule or any other module, on any device.
        path: The file, ending in ``.pt2``.
        example_inputs: What `forward` is called with: a tuple or list of positional arguments, a dict of keyword
            arguments, or its only argument. Default: the module's `example_input_array`. Tensors may be on any device
            and of any dtype; other values are constants of the program.
        example_kwargs: Further keyword arguments.
        dynamic_batch: Dimension 0 of the first tensor is the batch size; every tensor whose dimension 0 is as long may
            later come with any other, the same for all. With ``False`` all sizes are those of the examples.

    Returns:
        What was written and compared.

    Raises:
        ExportError: `torch.export` refuses the module; the message has the cause and the line that is to blame.
        ParityError: The file computes something else; the message names the output and the difference.
        ConfigError: `path` cannot be written, `forward` is missing or the examples do not fit it.
    """
    claim(type(module))  # whose lines a refusal names
    target = _target(path)
    if isinstance(module, torch._dynamo.OptimizedModule):
        module = module._orig_mod
    examples = examples_of(module, example_inputs, example_kwargs)
    if dynamic_batch and not examples.batch_size:
        raise ConfigError("dynamic_batch=True: no example input is a tensor with rows; pass dynamic_batch=False")
    eager = torch.compiler.set_stance("force_eager")  # of parts of the module that are compiled
    with torch.no_grad(), torch.random.fork_rng(devices=[]), eager:
        copied = copy_of(module, examples.signature)
        if dynamic_batch and examples.batch_size == 1:  # a size of 1 is always a constant of the program
            examples = examples.rows(2)
        program = traced(copied, examples, dynamic_batch)
        refuse_tensors_of(module, program)
        size = examples.batch_size
        others = [examples.rows(n) for n in ((size + 1, 1) if dynamic_batch else (size,) if size else ())]
        try:
            with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
                file = Path(folder) / target.name
                loaded = _written(program, file)
                compared = compare(copied, loaded, [examples, *others] if others else [examples, examples])
                file.replace(target)
        except OSError as error:
            raise ConfigError(f"cannot export to {path}: {error.strerror or error}") from error
    return ExportReport(
        path=target,
        num_bytes=target.stat().st_size,
        batch_sizes=tuple(dict.fromkeys(each.batch_size for each in [examples, *others] if each.batch_size)),
        dynamic=tuple(examples.batched) if dynamic_batch else (),
        bit_equal=compared.bit_equal,
        max_abs_difference=compared.max_abs,
        max_rel_difference=compared.max_rel,
    )


def _target(path: str | Path) -> Path:
    target = Path(path)
    if target.suffix != ".pt2" or target.is_dir():
        raise ConfigError(f"cannot export to {path}: give a file that ends in .pt2, as torch.export.load expects it")
    if not os.access(target.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot export to {path}: {target.parent} is no folder that can be written")
    return target


def _written(program: torch.export.ExportedProgram, file: Path) -> nn.Module:
    """Write a program and return what is read back."""
    try:
        with hushed():
            torch.export.save(program, file)
            return torch.export.load(file).module()
    except OSError:
        raise
    except Exception as error:  # whatever torch cannot write or read
        raise ExportError(
            f"the exported program cannot be written and read back: {summary_of(error)} Inputs and outputs have to be "
            f"tensors, numbers or None, in tuples, lists and dicts"
        ) from error
