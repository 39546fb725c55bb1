"""State dicts in the form of ``torch.optim.AdamW``, read and written without moving a tensor."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from zdtrain.errors import ConfigError
from zdtrain.optim.buckets import STATE_KEYS

STOCK_FLAGS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Entries that AdamW and Adam expect in a group; only ``fused`` says something about SimpleAdam."""


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(_snapshot(v) for v in value) if isinstance(value, tuple) else value


def plain_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups whose hyperparameter tensors are copies, so that a later write does not change what was saved."""
    return [{key: _snapshot(value) for key, value in group.items()} for group in groups]


def plain_state(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return state whose counts stand alone instead of being views of one buffer."""
    return {key: {**entry, "step": entry["step"].clone()} for key, entry in state.items()}


def check_saved(groups: list[dict[str, Any]], saved: Mapping[str, Any]) -> None:
    """Refuse a saved optimizer that computed something else, before anything is written.

    Raises:
        ConfigError: An option of the saved optimizer or an entry of its state cannot be taken over.
    """
    for i, group in enumerate(saved["param_groups"]):
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise ConfigError(f"param group {i} was saved with {flag}=True, which SimpleAdam does not have")
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay", 0) != 0:
            raise ConfigError(
                f"param group {i} was saved by Adam with coupled weight_decay={group['weight_decay']}, SimpleAdam "
                "decouples it: set weight_decay to 0 in the saved group, or train on with torch.optim.Adam"
            )
    params = [p for group in groups for p in group["params"]]
    names = {param: f"parameter {i} of shape {tuple(param.shape)}" for i, param in enumerate(params)}
    for param, entry in saved["state"].items():
        _check_entry(names.get(param, f"state entry {param!r}"), param, entry)


def load_groups(groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> None:
    """Write saved options into the groups in place."""
    for group, saved in zip(groups, saved_groups, strict=True):
        for key, value in saved.items():
            if key not in STOCK_FLAGS and key not in ("params", "schedule_step"):
                group[key] = _matching(group.get(key), value)


def _matching(current: Any, saved: Any) -> Any:
    """Return a saved option as the kind the group holds; loading may read a tensor, a step may not."""
    if isinstance(current, tuple) and isinstance(saved, (tuple, list)):
        return tuple(_matching(c, s) for c, s in zip(current, saved, strict=True))
    if isinstance(current, (int, float)) and isinstance(saved, Tensor):
        return saved.item()
    return saved


def saved_step_count(saved: Mapping[str, Any]) -> Any:
    """Return how many updates a saved run had made: its own count, or the largest of its parameters' counts."""
    own = saved["param_groups"][0].get("schedule_step") if saved["param_groups"] else None
    return own if own is not None else max((float(entry["step"]) for entry in saved["state"].values()), default=0.0)


def _check_entry(name: str, param: object, entry: Any) -> None:
    if not isinstance(param, Tensor) or not isinstance(entry, Mapping) or set(entry) != set(STATE_KEYS):
        found = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise ConfigError(f"{name}: the saved state holds {found}; SimpleAdam needs {', '.join(STATE_KEYS)}")
    for key in STATE_KEYS[1:]:
        if entry[key].shape != param.shape:
            raise ConfigError(f"{name}: the saved {key} has shape {tuple(entry[key].shape)}")
