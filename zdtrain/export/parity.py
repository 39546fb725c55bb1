"""Whether an exported program computes what the module does."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zdtrain.export.examples import Examples
from zdtrain.export.refusals import summary_of, where_of
from zdtrain.export.types import ExportError, ParityError


@dataclass
class Comparison:
    """How outputs of a program and of a module differ so far."""

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


def compare(module: nn.Module, program: nn.Module, inputs: list[Examples]) -> Comparison:
    """Run both on the same inputs, one after the other: state that they keep in buffers has to go the same way."""
    compared = Comparison()
    for examples in inputs:
        at = f" at batch size {examples.batch_size}" if examples.batch_size else ""
        try:
            expected = examples.run(module)
        except Exception as error:
            raise ExportError(
                f"{type(module).__name__}.forward fails{at}: {summary_of(error)}{where_of(error)}; dynamic_batch=False "
                f"(--static_batch) exports it for the batch size of the examples alone"
            ) from error
        try:
            actual = examples.run(program)
        except Exception as error:
            raise ParityError(
                f"the exported program fails{at}, where the module does not: {summary_of(error)}"
            ) from error
        _compare_outputs(compared, actual, expected, type(module).__name__ + at)
    return compared


def _compare_outputs(compared: Comparison, actual: Any, expected: Any, what: str) -> None:
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
