"""A trained module as a file that torch alone runs (`torch.export`), compared with the module before it is kept."""

import copy
import functools
import inspect
import io
import logging
import os
import tempfile
import traceback
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from zdtrain.errors import ConfigError, ZDTrainError
from zdtrain.source.location import frame_kind

# These print, at length, what is raised as well.
_NOISY_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


class ExportError(ZDTrainError, RuntimeError):
    """A module cannot be exported; nothing was written."""


class ParityError(ExportError):
    """The exported program does not compute what the module does; nothing was written."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was exported, and how it compares with the module."""

    path: Path
    """The file, for ``torch.export.load(path).module()``."""
    num_bytes: int
    """Its size."""
    batch_sizes: tuple[int, ...]
    """Batch sizes at which the outputs of the loaded file and of the module were compared."""
    dynamic: tuple[str, ...]
    """Inputs whose dimension 0 may have any size, the same for all; all other sizes are those of the examples."""
    bit_equal: bool
    """Whether every output was equal to the last bit."""
    max_abs_difference: float
    """The largest |exported - module| over all outputs."""
    max_rel_difference: float
    """The largest |exported - module| / |module| over all outputs, where the module's is not 0."""

    def __str__(self) -> str:
        equal = "equal to the module to the last bit"
        if not self.bit_equal:
            differences = f"{self.max_abs_difference:.3g} absolute, {self.max_rel_difference:.3g} relative"
            equal = f"equal to the module within torch.testing's tolerances (at most {differences})"
        what = "batch sizes" if len(self.batch_sizes) > 1 else "batch size"
        sizes = f" at {what} {', '.join(map(str, self.batch_sizes))}" if self.batch_sizes else ""
        batch = f"any batch size ({', '.join(self.dynamic)})" if self.dynamic else "the batch size of the examples only"
        return f"{self.path} ({self.num_bytes:,} bytes): {equal}{sizes}; takes {batch}"


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
    target = _target(path)
    if isinstance(module, torch._dynamo.OptimizedModule):
        module = module._orig_mod
    examples = _examples(module, example_inputs, example_kwargs)
    if dynamic_batch and not examples.batch_size:
        raise ConfigError("dynamic_batch=True: no example input is a tensor with rows; pass dynamic_batch=False")
    eager = torch.compiler.set_stance("force_eager")  # of parts of the module that are compiled
    with torch.no_grad(), torch.random.fork_rng(devices=[]), eager:
        copied = _copy(module, examples.signature)
        if dynamic_batch and examples.batch_size == 1:  # a size of 1 is always a constant of the program
            examples = examples.rows(2)
        program = _trace(copied, examples, dynamic_batch)
        _refuse_tensors_of(module, program)
        size = examples.batch_size
        others = [examples.rows(n) for n in ((size + 1, 1) if dynamic_batch else (size,) if size else ())]
        try:
            with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as folder:
                file = Path(folder) / target.name
                loaded = _written(program, file)
                compared = _compare(copied, loaded, [examples, *others] if others else [examples, examples])
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


class _Examples:
    """Arguments of a `forward` on the CPU, and the tensors among them that have one row per sample.

    Attributes:
        batched: Those tensors by name, e.g. ``"batch['tokens']"``.
        batch_size: How many rows they have; 0 if there are none.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: inspect.Signature,
        batched: Container[str] | None = None,
    ) -> None:
        self.args, self.kwargs, self.signature = args, kwargs, signature
        tensors = {
            f"{name}{pytree.keystr(path)}": leaf
            for name, value in signature.bind(*args, **kwargs).arguments.items()
            for path, leaf in pytree.tree_flatten_with_path(value)[0]
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        if batched is None:  # those that are as long as the first
            batched = [name for name in tensors if 0 < len(tensors[name]) == len(next(iter(tensors.values())))]
        self.batched = {name: tensor for name, tensor in tensors.items() if name in batched}
        self.batch_size: int = next((len(tensor) for tensor in self.batched.values()), 0)

    def rows(self, n: int) -> "_Examples":
        """Return examples with `n` rows: these from the last to the first, again and again."""
        index = torch.arange(n - 1, -1, -1) % self.batch_size
        batched = {id(tensor) for tensor in self.batched.values()}
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf[index] if id(leaf) in batched else leaf, (self.args, self.kwargs)
        )
        return _Examples(args, kwargs, self.signature, self.batched)

    def run(self, module: nn.Module) -> Any:
        """Return what a module makes of them; it may write into its arguments and draw random numbers."""
        torch.default_generator.manual_seed(0)
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (self.args, self.kwargs))
        return module(*args, **kwargs)


def _examples(module: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None) -> _Examples:
    name = type(module).__name__
    if getattr(module.forward, "__func__", None) in (nn.Module.forward, LightningModule.forward):
        raise ConfigError(f"{name} has no forward: define what the exported program is to compute")
    if inputs is None and kwargs is None:
        inputs = getattr(module, "example_input_array", None)
        if inputs is None:
            raise ConfigError(f"example_inputs: give arguments of {name}.forward, or set its example_input_array")
    args: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if inputs is None or isinstance(inputs, Mapping):
        args, kwargs = (), {**(inputs or {}), **(kwargs or {})}
    args, keywords = pytree.tree_map_only(Tensor, _on_cpu, (args, dict(kwargs or {})))
    signature = _named(inspect.signature(module.forward), keywords)
    try:
        return _Examples(args, keywords, signature)
    except TypeError as error:
        raise ConfigError(f"example_inputs do not fit {name}.forward{signature}: {error}") from error


def _named(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> inspect.Signature:
    """Return `signature` with the names of `kwargs` in place of ``**kwargs``, for which torch has no dynamic sizes."""
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(kept) == len(signature.parameters):
        return signature
    names = [name for name in kwargs if name not in {each.name for each in kept}]
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return signature.replace(parameters=[*kept, *keywords])


def _copy(module: nn.Module, signature: inspect.Signature) -> nn.Module:
    """Return a copy on the CPU in eval mode, without a trainer, whose forward has this signature."""
    name = type(module).__name__
    memo: dict[int, Any] = {}  # what deepcopy refuses, or would copy within the device's memory first
    for owner in module.modules():
        for leaf in pytree.tree_leaves(vars(owner)):
            if isinstance(leaf, Tensor) and (is_lazy(leaf) or leaf.is_meta):
                raise ExportError(
                    f"{name}: {type(owner).__name__} has weights without values; load them, or run a batch"
                )
            if isinstance(leaf, Tensor) and id(leaf) not in memo and not (leaf.is_cpu and leaf.is_leaf):
                memo[id(leaf)] = _on_cpu(leaf)
    try:
        copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ExportError(
            f"{name} cannot be copied: {_summary(error)}; export a module that holds no such thing"
        ) from error
    for part in copied.modules():
        vars(part).pop("_compiled_call_impl", None)  # of module.compile(); it calls the original
    if inspect.signature(copied.forward) != signature:
        original = copied.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        copied.forward = forward
    return copied.cpu().eval()


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy that is a leaf: of a parameter, a parameter."""
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _trace(module: nn.Module, examples: _Examples, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """Return the program, with zeros in place of the examples that it keeps: they may be somebody's data."""
    shapes = torch.export.ShapesCollection()
    batch = torch.export.Dim("batch")
    for tensor in examples.batched.values() if dynamic_batch else ():
        shapes[tensor] = {0: batch}
    try:
        with _hushed():
            dynamic = shapes.dynamic_shapes(module, examples.args, examples.kwargs)
            program = torch.export.export(module, examples.args, examples.kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # whatever torch, or the user's code on torch's stand-ins for tensors, raises
        raise ExportError(_refusal(module, examples, error)) from error
    program.example_inputs = pytree.tree_map_only(Tensor, torch.zeros_like, program.example_inputs)
    return program


def _refuse_tensors_of(module: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Raise if a program holds tensors of the module itself, which then ran in its place, perhaps in training mode."""
    constants = [constant for constant in program.constants.values() if isinstance(constant, Tensor)]
    held = {constant.untyped_storage().data_ptr() for constant in constants if constant.numel()}
    own = (*module.parameters(), *module.buffers())
    if held and any(tensor.untyped_storage().data_ptr() in held for tensor in own):
        raise ExportError(
            f"{type(module).__name__} holds a function that knows the module by itself, such as "
            f"`lambda x: self.net(x)`, and runs that in place of the copy in eval mode; make it a method"
        )


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep torch from printing half of a program, or tracebacks, before it raises."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    were = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, was in zip(loggers, were, strict=True):
            logger.disabled = was


def _refusal(module: nn.Module, examples: _Examples, error: Exception) -> str:
    """Return why a module cannot be exported, where, and what helps."""
    forward, where = f"{type(module).__name__}.forward", _where(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"{forward} cannot be exported: its Python code depends on the values of a tensor{where}; use torch.where "
            f"or torch.cond in place of `if`, and no size or index that is read from a tensor ({_summary(error)})"
        )
    if isinstance(error.__cause__ or error.__context__, ConstraintViolationError):
        _, _, needed = str(error).partition("Suggested fixes:")
        return (
            f"{forward} does not take every batch size: it needs {(needed or str(error)).strip().splitlines()[0]}. "
            f"Write -1 or x.shape[0] where it has a number, and no `if` on it; or pass dynamic_batch=False "
            f"(--static_batch). Taken as batched, since dimension 0 is {examples.batch_size}: "
            f"{', '.join(examples.batched)}; if one of them is not, give examples of another batch size"
        )
    try:
        examples.run(module)
    except Exception as own:  # then it is not about exporting
        return f"{forward} fails with the example inputs, before anything is exported: {_summary(own)}{_where(own)}"
    return (
        f"{forward} cannot be exported: {_summary(error)}{where}. torch.export runs it with tensors that have no "
        f"values: it has to work with operations of torch alone"
    )


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's on the way to an error, as `` (file:line)``; nothing if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame_kind(frame.filename) == "user"]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _written(program: torch.export.ExportedProgram, file: Path) -> nn.Module:
    """Write a program and return what is read back."""
    try:
        with _hushed():
            torch.export.save(program, file)
            return torch.export.load(file).module()
    except OSError:
        raise
    except Exception as error:  # whatever torch cannot write or read
        raise ExportError(
            f"the exported program cannot be written and read back: {_summary(error)} Inputs and outputs have to be "
            f"tensors, numbers or None, in tuples, lists and dicts"
        ) from error


@dataclass
class _Comparison:
    bit_equal: bool = True
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(self, actual: Any, expected: Any) -> None:
        """Compare one output.

        Raises:
            AssertionError: They are not close.
        """
        if not isinstance(expected, Tensor):
            if type(actual) is not type(expected) or actual != expected:
                raise AssertionError(f"{actual!r} in place of {expected!r}.")
            return
        torch.testing.assert_close(actual, expected, equal_nan=True)
        if torch.equal(_bytes(actual), _bytes(expected)):
            return
        self.bit_equal = False
        wide = torch.complex128 if expected.is_complex() else torch.float64
        differing = actual.ne(expected) & ~(actual.isnan() & expected.isnan())  # infinities that are equal have none
        exact = expected[differing].to(wide)
        differences = (actual[differing].to(wide) - exact).abs()
        for name, values in (("max_abs", differences), ("max_rel", (differences / exact.abs())[exact != 0])):
            setattr(self, name, max(getattr(self, name), float(values.max())) if len(values) else getattr(self, name))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _compare(module: nn.Module, program: nn.Module, inputs: list[_Examples]) -> _Comparison:
    """Run both on the same inputs, one after the other: state that they keep in buffers has to go the same way."""
    compared = _Comparison()
    for examples in inputs:
        at = f" at batch size {examples.batch_size}" if examples.batch_size else ""
        try:
            expected = examples.run(module)
        except Exception as error:
            raise ExportError(
                f"{type(module).__name__}.forward fails{at}: {_summary(error)}{_where(error)}; dynamic_batch=False "
                f"(--static_batch) exports it for the batch size of the examples alone"
            ) from error
        try:
            actual = examples.run(program)
        except Exception as error:
            raise ParityError(
                f"the exported program fails{at}, where the module does not: {_summary(error)}"
            ) from error
        _compare_outputs(compared, actual, expected, type(module).__name__ + at)
    return compared


def _compare_outputs(compared: _Comparison, actual: Any, expected: Any, what: str) -> None:
    leaves, structure = pytree.tree_flatten(actual)
    named, expected_structure = pytree.tree_flatten_with_path(expected)
    if structure != expected_structure:
        raise ParityError(f"{what}: the exported program returns {structure}, the module {expected_structure}")
    for leaf, (path, expected_leaf) in zip(leaves, named, strict=True):
        try:
            compared.add(leaf, expected_leaf)
        except AssertionError as error:
            raise ParityError(
                f"{what}: output{pytree.keystr(path)} of the exported program differs: {' '.join(str(error).split())} "
                f"The likely cause: forward depends on something that changes and is no input, parameter or buffer, "
                f"such as a counter, a global or the time; the program has the value of the moment of export"
            ) from error
