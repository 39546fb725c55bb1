"""Several recorded steps as one function of their batches: what each leaves to its host is kept apart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zdtrain.capture.graph import GraphProgram, capture_graph
from zdtrain.capture.recording import Recording
from zdtrain.capture.session import CaptureSession

Inputs = Sequence[Tensor | None] | Mapping[int, Tensor]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of the steps left."""

    loss: Tensor | None
    """Detached."""
    returned: list[Tensor]
    """Tensors that training_step returned besides."""
    carried: list[Tensor]
    """What takes the places of tensors that the step replaces."""
    shown: list[Tensor]
    """Copies of the values that the host may look at after the step."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What all of them left."""

    shares: list[Share]
    """One for each step."""
    gradients: list[Tensor | None]
    """Gradients after the last."""


class RepeatedSteps:
    """Runs recorded steps one after another: weights flow through in place, gradients and replaced tensors by hand.

    Args:
        recordings: A recorded step for each.
        shown: What the host may look at after a step.
        rates: Hyperparameters that the host sets anew for every step, 0-D; empty where none changes.
        keeps: Somebody looks at what the steps returned.
        between: Called with the number of each step that was run; its tensor operations belong to the program.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        *,
        shown: Sequence[Tensor],
        rates: Sequence[Tensor],
        keeps: bool,
        between: Callable[[int], None],
    ) -> None:
        self.recordings = list(recordings)
        self.shown = list(shown)
        self.rates = list(rates)
        self._keeps = keeps
        self._between = between
        self._n_leaves = recordings[0].n_leaves
        self._n_parameters = len(recordings[0].parameters)
        self.places = list(dict.fromkeys(place for recording in recordings for place in recording.carried.holders))
        self._program: GraphProgram | None = None

    @property
    def overwrites(self) -> bool:
        """Whether a run writes over what the run before left."""
        return self._program is not None

    @property
    def memory_bytes(self) -> int | None:
        """See `Program.memory_bytes`."""
        return None if self._program is None else self._program.memory_bytes

    def __len__(self) -> int:
        """Return the number of operations of all steps."""
        return sum(len(recording.program) for recording in self.recordings)

    def inputs(self, batches: Sequence[Sequence[Tensor]], rates: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
        """Return what a run reads.

        Args:
            batches: The tensors of each step's batch.
            rates: The values of `rates` for each step.
        """
        leaves = [leaf for batch in batches for leaf in batch]
        gradients = [parameter.grad for parameter in self.recordings[0].parameters]
        held = [place.tensor() for place in self.places]
        return [*leaves, *gradients, *held, *(rate for step in rates for rate in step)]

    def capture(self, inputs: Sequence[Tensor | None], session: CaptureSession) -> None:
        """Put it into a device graph, where there are graphs; it runs as it is elsewhere."""
        if not session.device_graphs:
            return
        used = [index for index, tensor in enumerate(inputs) if tensor is not None]
        static: dict[int, Tensor] = {}
        self._program = capture_graph(lambda: [self._run(static)], inputs, used, static.update, session.runtime)

    def run(self, inputs: Sequence[Tensor | None]) -> Left:
        """Run all steps."""
        if self._program is not None:
            left: Left = self._program.run(inputs)[0]
            return left
        return self._run(inputs)

    @torch.no_grad()
    def _run(self, inputs: Inputs) -> Left:
        get = inputs.get if isinstance(inputs, Mapping) else inputs.__getitem__
        count, n = len(self.recordings), self._n_leaves
        first = count * n
        gradients: list[Any] = [get(index) for index in range(first, first + self._n_parameters)]
        first += self._n_parameters
        held = {place: get(index) for index, place in enumerate(self.places, first)}
        first += len(self.places)
        shares = []
        for step, recording in enumerate(self.recordings):
            for index, rate in enumerate(self.rates, first + step * len(self.rates)):
                rate.copy_(get(index))  # type: ignore[arg-type]
            leaves = [get(index) for index in range(step * n, step * n + n)]
            holders = recording.carried.holders
            outputs = recording.program.body([*leaves, *gradients, *[held[place] for place in holders]])
            loss, returned, left, carried = recording.split(outputs)
            gradients = list(left)
            held.update(zip(holders, carried, strict=False))
            self._between(step)
            shares.append(self._share(loss, returned, carried, is_last=step == count - 1))
        return Left(shares=shares, gradients=gradients)

    def _share(self, loss: Any, returned: Sequence[Tensor], carried: Sequence[Tensor], *, is_last: bool) -> Share:
        """Keep what a step left apart from what the next one writes to."""
        return Share(
            loss=loss,
            returned=list(returned) if is_last or not self._keeps else [tensor.clone() for tensor in returned],
            carried=list(carried) if is_last else [tensor.clone() for tensor in carried],
            shown=[tensor.clone() for tensor in self.shown],
        )
