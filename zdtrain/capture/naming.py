"""Programs of one run told apart in words, where they are for batches of the same shapes."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from zdtrain.capture.report import ProgramReport

MODULE = "state of the module"
CONDITIONS = "conditions on counters"
LAYOUT = "layout of the batch"
_UPDATES = "state of the optimizer"
_NUMBERED = (MODULE, LAYOUT, _UPDATES)  # parts that are numbers of something
_FIELDS = {  # of the part of a key that is named by its fields
    "place": "place in the window",
    "without_gradient": "gradients that are there",
    "updates": _UPDATES,
}
Parts = Mapping[str, Hashable]


def parts_of(key: Sequence[Hashable], words: Sequence[str]) -> dict[str, Hashable]:
    """Return the parts of a step's key by what they stand for.

    Args:
        key: The key.
        words: What its parts stand for.
    """
    parts: dict[str, Hashable] = {}
    for value, word in zip(key, words, strict=False):
        fields = getattr(value, "_asdict", None)
        parts.update({_FIELDS[name]: field for name, field in fields().items()} if fields else {word: value})
    return parts


def told_apart(
    programs: Sequence[tuple[ProgramReport, Parts]], change: Callable[[Hashable, Hashable], str]
) -> list[ProgramReport]:
    """Return the reports; where several have one text for their keys, what differs is added to it.

    Args:
        programs: Reports, with the parts of their keys.
        change: Says in words what is different between two states of the module; empty where that is not known.
    """
    alike: dict[tuple[str, str], list[Parts]] = {}
    for report, parts in programs:
        alike.setdefault((report.step, report.key), []).append(parts)
    found, turns = [], dict.fromkeys(alike, 0)
    for report, parts in programs:
        group = (report.step, report.key)
        turns[group] += 1
        words = [*_differences(parts, alike[group], change)]
        if len(alike[group]) > 1 and not words:
            words = [f"no. {turns[group]}"]
        found.append(replace(report, key="; ".join([report.key, *words])))
    return found


def _differences(parts: Parts, alike: Sequence[Parts], change: Callable[[Hashable, Hashable], str]) -> Iterator[str]:
    for word, value in parts.items():
        values = list(dict.fromkeys(other.get(word) for other in alike))
        if len(values) < 2:
            continue
        if word not in _NUMBERED and isinstance(value, int | float | str):
            yield f"{word} {value}"
            continue
        number = values.index(value)
        what = change(values[0], value) if word == MODULE and number else ""
        yield f"{word} no. {number + 1}{what and f' ({what})'}"
