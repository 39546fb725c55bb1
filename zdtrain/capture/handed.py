"""Optimizers of torch inside a program: the numbers that they compute in Python are handed over before each run."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from zdtrain.capture.frozen import frozen
from zdtrain.capture.guards import Guards
from zdtrain.capture.program import Moved
from zdtrain.capture.rounded import rounded
from zdtrain.capture.rule import Rule, State
from zdtrain.capture.updates import RULES
from zdtrain.device import is_capturing
from zdtrain.errors import FallbackReason

MAX_CALLS = 8  # of one optimizer's step in a training step, for which numbers have room
NUMBERS = {  # by dtype of the parameters: what handed-over numbers have, so that they round as Python's do
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
HALF = (torch.bfloat16, torch.float16)


class Handover:
    """The parameters of one group that one step of the optimizer updates, and the numbers for them.

    Args:
        optimizer: The optimizer.
        index: Index of the group.
        params: Parameters of one dtype and device that have gradients, and state.
        rule: How they are updated.
        room: Where the numbers lie, on the host and on the device; shape=(params or more, numbers).
    """

    def __init__(
        self, optimizer: Optimizer, index: int, params: Sequence[Tensor], rule: Rule, room: tuple[Tensor, Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._index = index
        self._params = params
        self._rule = rule
        self._states = [optimizer.state.get(param, {}) for param in params]
        # 0-D views of memory: reading one takes a tenth of what `Tensor.item` does
        self._counts = [[memoryview(state[name].numpy()) for name in rule.counts] for state in self._states]
        self._kept = [list(state.values()) for state in self._states]  # so that nothing else gets their identity
        self._staged, self.numbers = (side[: len(params)] for side in room)
        self._host = self._staged.numpy()
        self.apart = room[0] is not room[1]

    def fill(self, moved: Moved | None = None) -> None:
        """Compute the numbers of the next update and bring them to the device.

        Args:
            moved: Where a step makes several updates: counts after the earlier ones, by id of the parameter; added to.
        """
        known, group = None, self._optimizer.param_groups[self._index]
        for row, counts in enumerate(self._counts if self._rule.counts else self._counts[:1]):
            before: Sequence[float] = [count[()] for count in counts]
            if moved is not None:
                before = moved.get(id(self._params[row]), before)
            if before != known:  # parameters that were frozen for a while lag behind
                after, numbers = self._rule.numbers(group, *before)
                self._host[row:] = (*after, *numbers)
                known = before
            if moved is not None:
                moved[id(self._params[row])] = self._host[row, : len(counts)].tolist()
        if self.apart and not is_capturing():
            self.numbers.copy_(self._staged, non_blocking=True)  # from pageable memory: copied away when this returns

    def count(self) -> None:
        """Do what the update does to counts that are not where the parameters are."""
        for counts, row in zip(self._counts, self._host, strict=True):
            for count, value in zip(counts, row, strict=False):
                count[()] = value

    def update(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Update the parameters and their state, with tensor operations only.

        Args:
            scale: What a fused kernel divides the gradients by before, in place, shape=(); None where it does not.
            found_inf: 1 where a fused kernel leaves everything as it is, shape=(); None where it never does.
        """
        for param, state, row in zip(self._params, self._states, self.numbers.unbind(), strict=True):
            assert param.grad is not None
            changed = [param, *state.values(), *([] if scale is None else [param.grad])]
            with _held_back(changed, found_inf):
                if scale is not None:
                    param.grad.div_(scale)
                self._update(param, param.grad, state, row.unbind())
        if self.apart and not is_capturing():
            self.count()

    def _update(self, param: Tensor, grad: Tensor, state: State, scalars: Sequence[Tensor]) -> None:
        rule, group = self._rule, self._optimizer.param_groups[self._index]
        for name, value in () if self.apart else zip(rule.counts, scalars, strict=False):
            state[name].copy_(value)
        of_param = {name: rounded(value) for name, value in state.items() if name not in rule.counts}
        rule.update(rounded(param), rounded(grad), of_param, group, scalars[len(rule.counts) :])


class InsideByRule:
    """An optimizer whose update is recorded as tensor operations, with what it computes in Python handed over.

    While a step is watched or recorded, ``optimizer.step`` is such an update. Groups and state are those of the
    optimizer all the time, and hold what its own step would have left there.

    Args:
        optimizer: The optimizer, of one of the kinds in `RULES`.
        exact: The update computes the same bits as the optimizer does.
    """

    def __init__(self, optimizer: Optimizer, *, exact: bool) -> None:
        self.exact = exact
        self.refusal: FallbackReason | None = None
        self._optimizer = optimizer
        self._rule = RULES[type(optimizer)]
        self._known: dict[Hashable, Handover] = {}
        self._rooms: dict[Hashable, tuple[Tensor, Tensor]] = {}  # by index of the group and layout
        self._taken: list[list[Handover]] = []  # by call of `step`
        self._step: Callable[..., Any] = optimizer.step

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InsideByRule, exact=self.exact), (self._optimizer,)  # the rest is addresses of this process

    def key(self) -> Hashable:
        """Return what a program holds by value, and where the state lies; numbers count by being zero or not."""
        held = self._rule.held
        groups = [
            (
                len(group["params"]),
                *[v if k in held else bool(v) for k, v in group.items() if k not in ("params", "param_names", "lr")],
            )
            for group in self._optimizer.param_groups
        ]
        return (tuple(groups), state_key(self._optimizer))

    def guard(self, guards: Guards) -> None:
        """Let `guards` look at what decides over `key`."""
        guard_groups(guards, self._optimizer, self._rule.held)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Put an update that can be recorded in the place of ``optimizer.step``."""
        attributes = self._optimizer.__dict__
        patched = attributes.get("step")  # by learning-rate schedulers, which count its calls
        self._step, self._taken, self.refusal = self._optimizer.step, [], None
        self._make_rooms()  # now: a watch takes what the step allocates for a tensor of the step's
        step: Any = self._recordable_step
        attributes["step"] = step
        try:
            yield
        finally:
            if patched is None:
                del attributes["step"]
            else:
                attributes["step"] = patched

    @property
    def counts_on_host(self) -> bool:
        """Whether numbers depend on how many updates there were."""
        return bool(self._rule.counts)

    def recorded(self) -> "RecordedUpdates":
        """Return what replays of the step that was recorded last need."""
        return RecordedUpdates(self._optimizer, self._taken)

    def _recordable_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether step was called
        with torch.no_grad():
            self.refusal = self.refusal or self._obstacle()
            if self.refusal is not None:
                if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
                    raise RuntimeError(self.refusal.message)
                self._step()
                return loss
            with torch._C.DisableTorchFunction(), _disable_current_modes():  # the host's share is not recorded
                self._taken.append(self._collect())
                for handover in self._taken[-1]:
                    handover.fill()
            scale, found_inf = (getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf"))
            for handover in self._taken[-1]:
                handover.update(scale, found_inf)
        return loss

    def _make_rooms(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            for layout, params in by_layout(group["params"]).items():
                if (index, layout) not in self._rooms:
                    after, numbers = self._rule.numbers(group, *[0.0] * len(self._rule.counts))
                    shape = (MAX_CALLS, len(params), len(after) + len(numbers))
                    host = torch.empty(shape, dtype=torch.float64 if self._rule.in_double else NUMBERS[params[0].dtype])
                    self._rooms[index, layout] = (host, on_device(host, params[0].device))

    def _obstacle(self) -> FallbackReason | None:
        name = type(self._optimizer).__name__
        if len(self._taken) == MAX_CALLS:
            return steps_outside(f"{name} steps over {MAX_CALLS} times in one training step")
        if self.exact and (reason := rounds_apart(self._optimizer)):
            return reason
        for group in self._optimizer.param_groups:
            needed = {*self._rule.counts, *self._rule.state(group)}
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    return steps_outside(f"{name} got a sparse gradient of shape {tuple(param.shape)}")
                state = self._optimizer.state.get(param, {})
                if any(state.get(one) is None for one in needed):
                    return steps_outside(f"{name} has no state yet for a parameter of shape {tuple(param.shape)}")
                if loaded := self._other_dtype(state):
                    return steps_outside(f"{name} counts in other numbers since a checkpoint was loaded: {loaded}")
        return None

    def _other_dtype(self, state: State) -> str | None:
        """Return which count has another dtype than torch gives a new one; loading makes it the parameter's."""
        usual = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        found = (f"{name} is {state[name].dtype}" for name in self._rule.counts if state[name].dtype != usual)
        return next(found, None)

    def _collect(self) -> list[Handover]:
        found = []
        for index, group in enumerate(self._optimizer.param_groups):
            for layout, params in by_layout(param for param in group["params"] if param.grad is not None).items():
                states = [self._optimizer.state.get(param, {}) for param in params]
                ids = [
                    tuple([id(value) for value in (param, *s.values())])
                    for param, s in zip(params, states, strict=True)
                ]
                key = (len(self._taken), index, *ids)
                if key not in self._known:
                    host, device = self._rooms[index, layout]
                    call = len(self._taken)
                    staged = host[call]
                    room = (staged, staged if device is host else device[call])
                    self._known[key] = Handover(self._optimizer, index, params, self._rule, room)
                found.append(self._known[key])
        return found


@contextmanager
def _held_back(tensors: Iterable[Tensor | None], flag: Tensor | None) -> Iterator[None]:
    """Take back what the body does to `tensors` where `flag` is 1, shape=()."""
    before = [] if flag is None else [(tensor, tensor.clone()) for tensor in tensors if tensor is not None]
    yield
    if flag is not None:
        for tensor, kept in before:
            tensor.copy_(torch.where(flag == 1, kept, tensor))


def state_key(optimizer: Optimizer) -> Hashable:
    """Return which parameters an optimizer has and where their state lies: any of it may be replaced, or all loaded."""
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    states: Any = optimizer.state.values()
    return (*params, len(states), *map(id, chain.from_iterable(map(dict.values, states))))


def guard_groups(guards: Guards, optimizer: Optimizer, held: Collection[str] | None = None) -> None:
    """Let `guards` look at groups, at their options but for learning rates, and at where the state lies.

    Args:
        guards: The guards.
        optimizer: The optimizer.
        held: The options that count by value; of others it counts whether they are zero. None for all.
    """
    groups, states = optimizer.param_groups, optimizer.state
    params = [group["params"] for group in groups]
    guards.hold(vars(optimizer), "param_groups", meaning=id)
    guards.hold(vars(optimizer), "state", meaning=id)
    guards.read(lambda: [*map(id, groups), *map(id, chain.from_iterable(params)), *map(id, states.values())])
    for group in groups:
        for name in group.keys() - {"lr", "initial_lr", "param_names"}:
            meaning = frozen if held is None or name in held else bool
            guards.hold(group, name, meaning=id if name == "params" else meaning)
    for state in states.values():
        for name in state:
            guards.hold(state, name, meaning=id)


class RecordedUpdates:
    """The updates of one optimizer in a recorded step.

    Args:
        optimizer: The optimizer.
        calls: What it updates, by call of its `step`.
    """

    def __init__(self, optimizer: Optimizer, calls: Sequence[Sequence[Handover]]) -> None:
        handovers = [handover for call in calls for handover in call]
        self._optimizer: Any = optimizer
        self._handovers = handovers
        self._several = len(calls) > 1
        self._apart = [handover for handover in handovers if handover.apart]

    def refill(self, moved: Moved | None = None) -> None:
        """Hand over the numbers of the next updates."""
        if moved is None and self._several:
            moved = {}
        for handover in self._handovers:
            handover.fill(moved)

    def rates(self) -> list[Tensor]:
        """Return the tensors that hold the numbers."""
        return [handover.numbers for handover in self._handovers]

    def ran(self) -> None:
        """Count updates where the host does."""
        for handover in self._apart:
            handover.count()

    def count(self) -> None:
        """Note that the optimizer stepped: schedulers ask."""
        self._optimizer._opt_called = True


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Return the tensor that a program on `device` reads what lies in `host` from: itself, on the host."""
    return host.to(device)


def by_layout(params: Iterable[Tensor]) -> dict[Hashable, list[Tensor]]:
    """Return the parameters by dtype and device."""
    found: dict[Hashable, list[Tensor]] = {}
    for param in params:
        found.setdefault((param.dtype, param.device), []).append(param)
    return found


def rounds_apart(optimizer: Optimizer) -> FallbackReason | None:
    """Return why an update by rule would not compute the bits of torch's own on a CPU; None where it does."""
    rule, name = RULES[type(optimizer)], type(optimizer).__name__
    for group in optimizer.param_groups:
        half = [str(p.dtype).removeprefix("torch.") for p in group["params"] if p.dtype in HALF]
        if group.get("foreach") and (half or not rule.foreach_alike):
            of_half = f" {half[0]} tensors" if half and rule.foreach_alike else ""
            return steps_outside(f"{name} has foreach=True, which rounds{of_half} in another order")
        if half and (rule.in_double or rule.adds_multiples(group)):
            what = f"{name} adds multiples of {half[0]} tensors, which torch rounds in another way at their ends"
            fused = "fused" in group and not group.get(
                "momentum"
            )  # with one, torch 2.13's kernel does not repeat itself
            return steps_outside(f"{what}; fused=True does not" if fused else what)
    return None


def steps_outside(message: str) -> FallbackReason:
    """Return the reason for an optimizer's step that is no part of a program."""
    return FallbackReason(code="optimizer-outside", message=f"the optimizer steps outside the program: {message}")
