"""Numbers that the host sees."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def values_at(places: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """Return what picks the values at some places of a sequence."""
    return itemgetter(*places) if len(places) > 1 else lambda values: [values[place] for place in places]
