"""Strict JSON for records: NaN and the infinities become strings that name them, everything else stays plain."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY = "NaN", "Infinity", "-Infinity"
_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would build an encoder for every line
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NONFINITE = {NAN: math.nan, POSITIVE_INFINITY: math.inf, NEGATIVE_INFINITY: -math.inf}


def encode_float(value: float) -> float | str:
    """Return `value` itself when finite, else ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return NAN
    return POSITIVE_INFINITY if value > 0 else NEGATIVE_INFINITY


def decode_float(value: float | str) -> float:
    """Undo `encode_float`."""
    return _NONFINITE[value] if isinstance(value, str) else value


def is_stored_float(value: Any) -> bool:
    """Return whether `value` is what `encode_float` makes of a number."""
    return isinstance(value, int | float) or (isinstance(value, str) and value in _NONFINITE)


def to_plain(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Turn any Python value into what strict JSON can hold: numbers, strings, booleans, None, lists and dicts.

    0-D tensors and arrays become numbers, paths and unknown objects become strings, and dataclasses become dicts. A
    container that holds itself is cut there.

    Args:
        value: The value.
        around: Identities of the containers that hold it.
    """
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return encode_float(float(value))
    if id(value) in around:
        return "..."
    inside = (*around, id(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, inside) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        return to_plain(held, inside)
    if isinstance(value, list | tuple | set | frozenset | range):
        return [to_plain(item, inside) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Path):
        return str(value)
    return _described(value, around)


def _described(value: Any, around: tuple[int, ...]) -> Any:
    """Return the number in a tensor or array, else the text that the object gives itself; neither may stop a run."""
    try:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            return to_plain(value.item(), around)
        return _ADDRESS.sub("", repr(value))  # two runs with the same settings say the same
    except Exception:  # whatever code of others raises
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def dump_line(value: Any) -> str:
    """Encode `value` as one line of strict JSON without a line end."""
    try:
        return _encode(value)
    except (ValueError, TypeError):  # a non-finite number or a value that is not plain
        return _encode(to_plain(value))


def dump_document(value: Any) -> str:
    """Encode `value` as an indented strict JSON document that ends with a line end."""
    return json.dumps(to_plain(value), allow_nan=False, indent=2) + "\n"
