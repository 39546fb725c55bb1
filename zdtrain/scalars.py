"""Numbers that live on the device: 0-D buffers with one address and one dtype for the whole run."""

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zdtrain.errors import ConfigError, yaml_hint

_log = logging.getLogger(__name__)

Value = bool | int | float
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
}
DTYPES["bool"] = torch.bool
_KINDS = {bool: torch.bool, int: torch.int64, float: torch.float32}


class FixedBuffers(nn.Module):
    """A module whose buffers keep their dtype always and their identity wherever torch allows it.

    ``model.bfloat16()`` leaves them as they are, and ``model.to(device)`` moves their memory while the tensor objects
    that optimizers, schedules and captured steps hold stay the same.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FixedBuffers":
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._place(name, buffer, fn(buffer).device)
        return self

    def _place(self, name: str, buffer: Tensor, device: torch.device) -> None:
        if buffer.device == device:
            return
        moved = self._moved(name, buffer, device)
        if torch._has_compatible_shallow_copy_type(buffer, moved):
            buffer.data = moved
        else:  # to or from the meta device
            self._buffers[name] = moved

    def _moved(self, name: str, buffer: Tensor, device: torch.device) -> Tensor:  # noqa: ARG002 - subclasses use name
        return torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


class DeviceScalars(FixedBuffers):
    """Named 0-D tensors that a module, a loss, a schedule, an optimizer and a monitor share.

    Reading an attribute gives the tensor, assigning to it writes the tensor in place, so a change is seen everywhere
    and nothing is captured or compiled again. What the host wrote last is mirrored on the host, where `host` finds it
    without waiting for the device.

    The dtype never depends on a global default: a ``float`` makes a float32, an ``int`` an int64, a ``bool`` a bool;
    a 0-D tensor keeps its own, and ``{"value": 1.0, "dtype": "float64"}`` names one. It stays when a module is cast:
    the learning rate of a bfloat16 model is float32.

    Args:
        values: Initial values by name.
        device: Where the tensors are made. They move with ``.to()`` like any buffer, keeping their identity.

    Raises:
        ConfigError: A name cannot be an attribute, or a value is not one number.

    Example:
        >>> scalars = DeviceScalars({"lr": 0.1, "patience": 3})
        >>> lr = scalars.lr
        >>> scalars.lr = 0.05
        >>> lr, lr is scalars.lr, scalars.host("lr")
        (tensor(0.0500), True, 0.05)
    """

    _host: dict[str, Value | None]

    def __init__(self, values: Mapping[str, Any] | None = None, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "_host", {})
        for name, value in (values or {}).items():
            self.add(name, value, device=device)

    def add(self, name: str, value: Any, *, device: torch.device | str | None = None) -> Tensor:
        """Declare a scalar.

        Args:
            name: How it is read; a Python identifier that ``nn.Module`` does not use.
            value: ``float``, ``int``, ``bool``, 0-D tensor, or ``{"value": ..., "dtype": ...}``.
            device: Where to put it; beside the other scalars if None.

        Returns:
            The tensor, 0-D.
        """
        if not isinstance(name, str) or not name.isidentifier() or hasattr(type(self), name) or name in self.__dict__:
            raise ConfigError(f"a scalar cannot be called {name!r}: use an identifier that nn.Module does not have")
        if name in self._buffers:
            raise ConfigError(f"scalar {name!r} exists already: assign to it instead")
        number, dtype, own_device = _declaration(name, value)
        if device is None:
            device = own_device or next((buffer.device for buffer in self.buffers()), torch.device("cpu"))
        if isinstance(number, Tensor):
            tensor = number.detach().to(device, copy=True)
            self._host[name] = number.item() if number.device.type == "cpu" else None
        else:
            tensor = torch.full((), number, dtype=dtype, device=device)
            self._host[name] = number
        self.register_buffer(name, tensor)  # shape=(), device-resident
        return tensor

    def __getattr__(self, name: str) -> Tensor:
        buffer = self.__dict__["_buffers"].get(name) if "_buffers" in self.__dict__ else None
        if buffer is None:
            raise AttributeError(self._unknown(name))
        return buffer  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif name in self.__dict__.get("_buffers", {}):
            self._write(name, value)
        elif "_buffers" not in self.__dict__:
            super().__setattr__(name, value)  # nn.Module sets up its own attributes
        else:
            raise AttributeError(f"{self._unknown(name)}; declare a new one with scalars.add({name!r}, value)")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._buffers:
            raise KeyError(self._unknown(name))
        return getattr(self, name)  # type: ignore[no-any-return]

    def __setitem__(self, name: str, value: Value | Tensor) -> None:
        if name not in self._buffers:
            raise KeyError(self._unknown(name))
        self._write(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, list(self.__dict__.get("_buffers", {})), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self) or 'none'}"
        return f"no scalar called {name!r}; {hint}"

    def _write(self, name: str, value: Value | Tensor) -> None:
        scalar = self._buffers[name]
        assert scalar is not None
        if isinstance(value, Tensor):
            _check_tensor(name, value, scalar)
            with torch.no_grad():
                scalar.copy_(value)
            self._host[name] = None
        else:
            self._host[name] = _check_number(name, value, scalar.dtype)
            with torch.no_grad():
                scalar.fill_(value)

    def host(self, name: str) -> Value | None:
        """Return what the host wrote last, without a read from the device.

        Args:
            name: Name of the scalar.

        Returns:
            The number, or None if a device tensor was assigned since. A scalar that a step changes in place on the
            device is known here only through `set_host`.
        """
        if name not in self._host:
            raise KeyError(self._unknown(name))
        return self._host[name]

    def set_host(self, **values: Value) -> None:
        """Note on the host what the device has counted for itself; the tensors are not touched.

        Example:
            >>> scalars = DeviceScalars({"global_step": 0})
            >>> _ = scalars.global_step.add_(1)  # in a captured step
            >>> scalars.set_host(global_step=1)
            >>> scalars.host("global_step")
            1
        """
        for name, value in values.items():
            self._host[name] = _check_number(name, value, self[name].dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers that YAML and JSON can hold and `DeviceScalars` accepts.

        Reads the device for scalars whose value the host does not know, so it belongs where a run is saved.
        """
        plain: dict[str, Any] = {}
        for name in self:
            known = self._host[name]
            value = self[name].item() if known is None else known
            dtype = self[name].dtype
            if dtype is _KINDS[type(value)]:
                plain[name] = value
            else:
                plain[name] = {"value": value, "dtype": str(dtype).removeprefix("torch.")}
        return plain

    def extra_repr(self) -> str:
        """Return names, host values and dtypes."""
        return "\n".join(f"{name}={self._host[name]} ({self._buffers[name].dtype})" for name in self)  # type: ignore[union-attr]

    def _moved(self, name: str, buffer: Tensor, device: torch.device) -> Tensor:
        known = self._host[name]
        if buffer.is_meta and known is not None:
            return torch.full((), known, dtype=buffer.dtype, device=device)
        return super()._moved(name, buffer, device)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],  # noqa: ARG002 - nn.Module's signature
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Write saved values in place, also under ``assign=True``, and say in the log what was loaded."""
        said = []
        for name in self:
            saved = state_dict.get(prefix + name)
            if saved is None:
                said.append(f"{name} stays {self._host[name]} (not saved)")
                if strict:
                    missing_keys.append(prefix + name)
            elif saved.dim() != 0 or saved.dtype != self[name].dtype:
                error_msgs.append(
                    f"scalar {prefix + name!r} is 0-D {self[name].dtype}, "
                    f"the checkpoint holds {saved.dtype} of shape {tuple(saved.shape)}"
                )
            else:
                before = self._host[name]
                self._host[name] = saved.item()
                with torch.no_grad():
                    self[name].copy_(saved)
                said.append(f"{name} {before} -> {self._host[name]}")
        for key in state_dict:
            if key.startswith(prefix) and key.removeprefix(prefix) not in self:
                said.append(f"{key.removeprefix(prefix)} ignored (no such scalar)")
                if strict:
                    unexpected_keys.append(key)
        _log.info("scalars loaded: %s", "; ".join(said) or "none")


def _declaration(name: str, value: Any) -> tuple[Value | Tensor, torch.dtype, torch.device | None]:
    """Return the number or tensor, its dtype, and its device if it has one."""
    if isinstance(value, Mapping):
        if set(value) != {"value", "dtype"} or value["dtype"] not in DTYPES:
            raise ConfigError(
                f"scalar {name!r} must be {{'value': ..., 'dtype': one of {', '.join(DTYPES)}}}, got {dict(value)}"
            )
        dtype = DTYPES[value["dtype"]]
        return _check_number(name, value["value"], dtype), dtype, None
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES.values():
            raise ConfigError(
                f"scalar {name!r} cannot be {value.dtype}: use one of {', '.join(DTYPES)}, whatever the weights' dtype"
            )
        _check_shape(name, value)
        return value, value.dtype, value.device
    if type(value) not in _KINDS:
        raise ConfigError(f"scalar {name!r} must be a float, int, bool or 0-D tensor, got {value!r}{yaml_hint(value)}")
    return value, _KINDS[type(value)], None


def _check_shape(name: str, value: Tensor) -> None:
    if value.dim() != 0:
        hint = "use .squeeze()" if value.numel() == 1 else "reduce it, e.g. .mean()"
        raise ConfigError(f"scalar {name!r} must be 0-D, got shape {tuple(value.shape)}: {hint}")


def _check_tensor(name: str, value: Tensor, scalar: Tensor) -> None:
    _check_shape(name, value)
    if value.dtype != scalar.dtype:
        raise ConfigError(f"scalar {name!r} is {scalar.dtype}, got {value.dtype}: convert with .to({scalar.dtype})")
    if value.device != scalar.device:
        raise ConfigError(
            f"scalar {name!r} is on {scalar.device}, got a tensor on {value.device}: "
            f"assign a Python number, or a tensor made with device='{scalar.device}'"
        )


def _check_number(name: str, value: Any, dtype: torch.dtype) -> Value:
    if type(value) not in _KINDS:
        raise ConfigError(f"scalar {name!r} must be a number or 0-D tensor, got {value!r}{yaml_hint(value)}")
    given = _KINDS[type(value)]
    if dtype.is_floating_point:
        if given is torch.bool:
            raise ConfigError(f"scalar {name!r} is {dtype}, got the bool {value}: write {float(value)}")
        return float(value)
    if (dtype is torch.bool) != (given is torch.bool) or given.is_floating_point:
        raise ConfigError(
            f"scalar {name!r} is {dtype} and cannot hold {value!r}: "
            "its dtype follows the value it was declared with, so declare 1.0 where 1 is not meant as an int"
        )
    return value  # type: ignore[no-any-return]
