"""Weights from a checkpoint into a module, with an account of what keeps its initial values and what is not used."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zdtrain.errors import ConfigError, ZDTrainError, ZDTrainWarning
from zdtrain.suggest import nearest

_SHOWN = 8  # names of a kind in a sentence


class WeightsError(ZDTrainError, RuntimeError):
    """A checkpoint does not fit a module; `report` says where."""

    def __init__(self, message: str, report: "WeightsReport") -> None:
        super().__init__(message)
        self.report = report


class WeightsWarning(ZDTrainWarning):
    """A part of a module keeps its initial values, or a part of a checkpoint is not used."""


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """What became of the tensors of a module and of a checkpoint, by their names in the module."""

    loaded: tuple[str, ...]
    """Parameters and buffers that got the checkpoint's values."""
    fresh: tuple[str, ...] = ()
    """Those that the checkpoint does not have: they keep their initial values."""
    unused: tuple[str, ...] = ()
    """What the checkpoint has and the module has not."""
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Name, shape in the checkpoint, shape in the module, where these differ: they keep their initial values, too."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs out of `unused` and `fresh` that may be the same tensor: alike in name, equal in shape."""

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of the module and of the checkpoint found the other."""
        return not (self.fresh or self.unused or self.reshaped)

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.fresh) + len(self.reshaped)
        parts = [f"{len(self.loaded)} of {total} tensors loaded"]
        if self.fresh:
            parts.append(f"not in the checkpoint, so they keep their initial values: {_listed(self.fresh)}")
        if self.reshaped:
            shapes = [f"{name} {list(there)}, here {list(here)}" for name, there, here in self.reshaped]
            parts.append(f"of another shape in the checkpoint, so they keep their initial values: {_listed(shapes)}")
        if self.unused:
            parts.append(f"in the checkpoint, but not in the module: {_listed(self.unused)}")
        if self.renamed:
            parts.append(f"perhaps renamed: {_listed([f'{old} -> {new}' for old, new in self.renamed])}")
        return "; ".join(parts)


def compare(
    module: nn.Module, state: Mapping[str, Any], *, fresh: Sequence[str], unused: Sequence[str]
) -> WeightsReport:
    """Return what loading `state` into `module` does, where it is known which names have no counterpart.

    Args:
        module: The module.
        state: Its parameters and buffers to be, by name.
        fresh: Names that `state` lacks.
        unused: Names that `module` lacks.
    """
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    reshaped = {name: (state[name], value) for name, value in own.items() if not _fits(value, state.get(name, value))}
    return WeightsReport(
        loaded=tuple(name for name in own if name not in fresh and name not in reshaped),
        fresh=tuple(fresh),
        unused=tuple(unused),
        reshaped=tuple((name, _shape(there), _shape(here)) for name, (there, here) in reshaped.items()),
        renamed=tuple(_pairs(own, state, fresh, unused)),
    )


def _pairs(
    own: Mapping[str, Tensor], state: Mapping[str, Any], fresh: Sequence[str], unused: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield names of the checkpoint and of the module that may mean the same tensor."""
    free = list(unused)
    for name in fresh:
        alike = nearest(
            name, [other for other in free if name in own and _shape(state.get(other)) == _shape(own[name])]
        )
        if alike is not None:
            free.remove(alike)
            yield alike, name


def load_weights(
    module: nn.Module, path: str | Path, *, strict: bool = True, prefix: str = "", weights_only: bool = True
) -> WeightsReport:
    """Load a checkpoint's parameters and buffers into a module, on whichever device the module is.

    Optimizer, schedule and counters of the checkpoint are left alone: a fit that follows starts anew, with these
    weights. To go on with a run, pass ``ckpt_path`` to ``Trainer.fit`` instead.

    Args:
        module: A LightningModule, or any part of one.
        path: A checkpoint of Lightning or zdtrain, or a file that holds a state dict; the device it was saved on need
            not be there.
        strict: Every tensor of the module and of the checkpoint must find the other. With ``False``, what does not fit
            keeps its initial values; the report says what.
        prefix: Take only names that begin with it, and take it off: ``"net."`` loads what a module called ``net`` held.
        weights_only: Refuse files that hold more than tensors and plain Python values, since reading those runs code
            out of the file.

    Returns:
        What found its place.

    Raises:
        WeightsError: The checkpoint does not fit; what fits was loaded all the same.
        ConfigError: `path` cannot be read as a checkpoint, or no name begins with `prefix`.
    """
    state = _read(Path(path), weights_only=weights_only)
    if prefix:
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if not found:
            raise ConfigError(f"prefix={prefix!r}: no name in {path} begins with it, they are {_listed([*state])}")
        state = found
    own = module.state_dict()
    fitting = {name: value for name, value in state.items() if _fits(own.get(name, value), value)}
    keys = module.load_state_dict(fitting, strict=False)
    fresh = [name for name in keys.missing_keys if name not in state]
    report = compare(module, state, fresh=fresh, unused=keys.unexpected_keys)
    if strict and not report.is_complete:
        raise WeightsError(f"{path} does not fit {type(module).__name__}: {report}. strict=False accepts that.", report)
    return report


def _read(path: Path, *, weights_only: bool) -> dict[str, Any]:
    """Return the state dict in a file, on the CPU."""
    if not path.is_file():
        raise ConfigError(f"path={str(path)!r}: there is no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise ConfigError(f"path={str(path)!r}: this is no checkpoint ({error})") from error
        raise ConfigError(
            f"path={str(path)!r}: this is no checkpoint, or it holds more than tensors and plain values; if you trust "
            f"where it comes from, pass weights_only=False"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ConfigError(f"path={str(path)!r}: this is no checkpoint ({error})") from error
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"path={str(path)!r}: this file holds no state dict")
    return dict(state)


def _fits(own: Any, value: Any) -> bool:
    return is_lazy(own) or is_lazy(value) or _shape(own) == _shape(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) and not is_lazy(value) else ()


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
