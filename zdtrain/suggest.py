"""The nearest known name for one that is not known."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that `name` is most likely a slip of, or None."""
    candidates = list(known)
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if not matches:  # a dotted name is often right but for its prefix
        matches = [candidate for candidate in candidates if candidate.rpartition(".")[2] == name][:1]
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` or an empty string."""
    match = nearest(name, known)
    return f"; did you mean {match!r}?" if match else ""
