"""Modules that optimize by hand: what a batch's updates used, and taking back all that the batch changed."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zdtrain.errors import ConfigError
from zdtrain.monitor.base import Monitor
from zdtrain.monitor.conditions import NonFinite
from zdtrain.monitor.masking import Copies, FreshState, refuse_host_state, refuse_lbfgs
from zdtrain.optim.clipping import total_norm

_MOVES = ("last_epoch", "_step_count")  # what a scheduler counts


class UpdatesByHand:
    """Notices which optimizers a batch steps, and the norm of the gradients that it uses.

    Args:
        optimizers: The optimizers.
        measures_norm: Measure the norm.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, measures_norm: bool) -> None:
        self._optimizers = list(optimizers)
        self._measures_norm = measures_norm
        self._stepped: set[Optimizer] = set()
        self._norms: list[Tensor] = []
        self._handles = [optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers]

    def begin(self) -> None:
        """Begin a batch."""
        self._stepped.clear()
        self._norms.clear()

    @property
    def has_stepped(self) -> bool:
        """Whether the batch stepped an optimizer so far."""
        return bool(self._stepped)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        self._stepped.add(optimizer)
        self._measure(optimizer)

    @torch.no_grad()
    def _measure(self, optimizer: Optimizer) -> None:
        gradients = [gradient for p in _parameters_of(optimizer) if (gradient := p.grad) is not None]
        if gradients and self._measures_norm:
            self._norms.append(total_norm(gradients))

    @torch.no_grad()
    def norm(self) -> Tensor | None:
        """Return the L2 norm over the gradients of all updates, 0-D; None without a gradient.

        Of an optimizer that the batch did not step, the gradients that are there now count: a later batch may use them.
        """
        for optimizer in self._optimizers:
            if optimizer not in self._stepped:
                self._measure(optimizer)
        if not self._norms:
            return None
        return self._norms[0] if len(self._norms) == 1 else torch.linalg.vector_norm(torch.stack(self._norms))

    def release(self) -> None:
        """Leave the optimizers as they were found."""
        for handle in self._handles:
            handle.remove()


def only_looks(hook: Any) -> bool:
    """Return whether a hook on an optimizer's step is that of `UpdatesByHand`, which changes nothing."""
    return isinstance(getattr(hook, "__self__", None), UpdatesByHand)


class BatchMask:
    """Copies of all that a batch may change by hand, put back behind it: the mask of such a batch.

    Parameters of the module, of whatever use, gradients, and state and options of the optimizers stay on the device.
    Where a batch changes what only the host knows, that is an option that is a number, a schedule, or which parameters
    have a gradient, the host waits for the batch's verdict.

    Args:
        optimizers: The optimizers. What their steps change has to be in tensors on the parameters' device.
        schedulers: Their schedulers, which the module may step.
        module: The module.
        flag: Nonzero where the batch is taken back.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], module: nn.Module, flag: Tensor
    ) -> None:
        for optimizer in optimizers:
            refuse_lbfgs(optimizer)
        self._optimizers, self._schedulers, self._module = list(optimizers), list(schedulers), module
        self._flag = flag
        self._fresh = [FreshState(optimizer, flag) for optimizer in optimizers]
        self._unchecked = list(optimizers)
        self._copies = Copies()
        self._is_lifted = False
        self._had_gradient: set[Tensor] = set()
        self._groups: list[dict[str, Any]] = []
        self._schedules: list[dict[str, Any]] = []
        self._moves: list[Any] = []

    @torch.no_grad()
    def before(self) -> None:
        """Copy what the batch may change."""
        self._had_gradient = {p for p in self._parameters() if p.grad is not None}
        self._groups = [dict(group) for group in self._live_groups()]
        self._schedules = [scheduler.state_dict() for scheduler in self._schedulers]
        self._moves = self._count_moves()
        self._copies.save(self._live())

    def lift(self, is_lifted: bool) -> None:
        """Say if what the batch did certainly stands, because the flag is known not to be set."""
        self._is_lifted = is_lifted

    @torch.no_grad()
    def after(self) -> None:
        """Put everything back where the flag is set."""
        for fresh in self._fresh:
            fresh.after(is_lifted=self._is_lifted)
        for optimizer in [optimizer for optimizer in self._unchecked if optimizer.state]:
            refuse_host_state(optimizer)
            self._unchecked.remove(optimizer)
        if self._is_lifted:
            return
        hold = self._flag != 0
        self._copies.put_back(self._live(), hold)
        if self._changed_on_host() and bool(hold):
            self._put_back_on_host()

    def _parameters(self) -> Iterator[Tensor]:
        of_all = [*self._module.parameters(), *(p for one in self._optimizers for p in _parameters_of(one))]
        return (parameter for parameter in dict.fromkeys(of_all) if not is_lazy(parameter))

    def _live_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _live(self) -> dict[Hashable, Tensor]:
        found: dict[Hashable, Tensor] = {}
        for parameter in self._parameters():
            found[id(parameter)] = parameter
            if parameter.grad is not None and parameter in self._had_gradient:
                found["gradient", id(parameter)] = parameter.grad
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state.items():
                found.update({(id(parameter), n): value for n, value in state.items() if isinstance(value, Tensor)})
            attributes = vars(optimizer).items()
            found.update({("attribute", number, n): value for n, value in attributes if isinstance(value, Tensor)})
        for number, group in enumerate(self._live_groups()):
            for name, option in group.items():
                leaves = enumerate(tree_leaves(option)) if name != "params" else ()
                found.update({("option", number, name, i): leaf for i, leaf in leaves if isinstance(leaf, Tensor)})
        return found

    def _count_moves(self) -> list[Any]:
        return [getattr(scheduler, name, None) for scheduler in self._schedulers for name in _MOVES]

    def _changed_on_host(self) -> bool:
        if self._had_gradient != {p for p in self._parameters() if p.grad is not None}:
            return True
        pairs = zip(self._live_groups(), self._groups, strict=False)
        written = any(group.get(name) is not value for group, then in pairs for name, value in then.items())
        return written or self._count_moves() != self._moves

    def _put_back_on_host(self) -> None:
        for parameter in self._parameters():
            if parameter not in self._had_gradient:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = self._copies["gradient", id(parameter)].clone()
        for scheduler, state in zip(self._schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(state)
        for group, then in zip(self._live_groups(), self._groups, strict=False):
            for name, value in then.items():
                if group.get(name) is not value:
                    group[name] = value

    def release(self) -> None:
        """Do nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies."""
        return self._copies.tensors()


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def refuse_by_hand(monitors: Sequence[Monitor]) -> None:
    """Refuse monitors that need Lightning's automatic optimization.

    Raises:
        ConfigError: There is one.
    """
    for monitor in monitors:
        if monitor.action == "clip":
            raise ConfigError(
                f"trainer.monitors: {monitor!r} can't clip: the module optimizes by hand "
                "(automatic_optimization=False), so training_step has used its gradients when monitors see its values. "
                "Clip there, self.clip_gradients(optimizer, gradient_clip_val=...), or use then='skip'."
            )
        if isinstance(monitor, NonFinite) and monitor.find_module:
            raise ConfigError(
                f"trainer.monitors: {monitor!r} has find_module=True, which runs training_step again, but the module "
                "optimizes by hand (automatic_optimization=False), so that would step its optimizers. Leave it out."
            )
