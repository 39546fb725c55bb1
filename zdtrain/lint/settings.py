"""Options of the linter: from ``[tool.zdtrain.lint]`` of a pyproject.toml, overridden by the command line."""

import difflib
import fnmatch
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from zdtrain.errors import ConfigError
from zdtrain.lint.finding import Severity
from zdtrain.lint.rules.registry import ALL

LEVELS = {severity.label: severity for severity in Severity}


@dataclass(frozen=True, kw_only=True)
class LintSettings:
    """What to lint, with which rules, and what to show."""

    select: tuple[str, ...] = ("ZD",)
    """Rule codes or their beginnings (``ZD1``); the most specific of `select` and `ignore` wins."""
    ignore: tuple[str, ...] = ()
    """Rule codes or their beginnings that are not applied."""
    level: Severity = Severity.WARNING
    """The lowest severity that is shown and counts for the exit status."""
    exclude: tuple[str, ...] = ()
    """Glob patterns of paths that are not linted, beside caches, environments and builds."""
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Glob pattern of paths -> rule codes or their beginnings that do not apply there."""
    max_file_bytes: int = 2_000_000
    """Larger files are reported as not linted."""

    @cached_property
    def codes(self) -> tuple[str, ...]:
        """The codes of the rules to apply."""
        return tuple(code for code in ALL if self._is_selected(code))

    def _is_selected(self, code: str) -> bool:
        chosen = max((len(prefix) for prefix in self.select if code.startswith(prefix)), default=-1)
        dropped = max((len(prefix) for prefix in self.ignore if code.startswith(prefix)), default=-1)
        return chosen > dropped

    def ignored_in(self, path: str) -> tuple[str, ...]:
        """Code prefixes that do not apply to a file."""
        return tuple(
            prefix
            for pattern, prefixes in self.per_file_ignores.items()
            if matches(path, pattern)
            for prefix in prefixes
        )

    def with_options(self, **options: Any) -> "LintSettings":
        """A copy with those options changed that are not None."""
        return checked(replace(self, **{name: value for name, value in options.items() if value is not None}))


def matches(path: str, pattern: str) -> bool:
    """Whether a path, or its end, matches a glob pattern; ``**`` and a folder's name match what is below."""
    parts = PurePath(path).as_posix().removeprefix("./").split("/")
    pattern = pattern.rstrip("/")
    candidates = ["/".join(parts[at:]) for at in range(len(parts))]
    return any(fnmatch.fnmatch(text, pattern) or fnmatch.fnmatch(text, f"{pattern}/*") for text in candidates)


def find_pyproject(start: Path) -> Path | None:
    """The nearest pyproject.toml at or above a path that has a ``[tool.zdtrain.lint]`` table."""
    start = start.resolve()
    for folder in (start, *start.parents):
        candidate = folder / "pyproject.toml"
        if candidate.is_file() and "tool.zdtrain" in candidate.read_text(encoding="utf-8", errors="replace"):
            return candidate
    return None


def load_settings(path: Path | None) -> LintSettings:
    """Settings from a pyproject.toml; the defaults if there is none.

    Raises:
        ConfigError: if the file is not TOML or an option is unknown or of the wrong type.
    """
    if path is None:
        return LintSettings()
    try:
        with path.open("rb") as file:
            table = tomllib.load(file).get("tool", {}).get("zdtrain", {}).get("lint", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} could not be read: {error}") from error
    known = {item.name.replace("_", "-"): item.name for item in fields(LintSettings)}
    options: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known are {', '.join(sorted(known))}"
            raise ConfigError(f"{path}: tool.zdtrain.lint has no option `{name}`{hint}")
        options[known[name]] = _convert(name, value)
    return checked(LintSettings(**options))


def _convert(name: str, value: object) -> object:
    if name == "level":
        return parse_level(value, "tool.zdtrain.lint.level")
    if name == "max-file-bytes":
        if type(value) is not int or value <= 0:
            raise ConfigError(f"tool.zdtrain.lint.max-file-bytes must be a positive integer, got {value!r}")
        return value
    if name == "per-file-ignores":
        if not isinstance(value, Mapping):
            raise ConfigError(f"tool.zdtrain.lint.per-file-ignores must be a table of lists, got {value!r}")
        return {pattern: _strings(f"per-file-ignores.{pattern}", codes) for pattern, codes in value.items()}
    return _strings(name, value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"tool.zdtrain.lint.{name} must be a list of strings, got {value!r}")
    return tuple(value)


def parse_level(value: object, option: str) -> Severity:
    """A severity by name.

    Raises:
        ConfigError: if there is none of that name; names `option`.
    """
    if isinstance(value, Severity):
        return value
    if isinstance(value, str) and value in LEVELS:
        return LEVELS[value]
    raise ConfigError(f"{option} must be one of {', '.join(LEVELS)}, got {value!r}")


def check_codes(codes: Iterable[str], option: str) -> None:
    """Refuses prefixes that no rule has.

    Raises:
        ConfigError: with the nearest code.
    """
    for prefix in codes:
        if prefix and any(code.startswith(prefix) for code in ALL):
            continue
        near = difflib.get_close_matches(prefix.upper(), ALL, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{option}: no rule begins with {prefix!r}{hint} (`zdtrain rule --all` lists them)")


def checked(settings: LintSettings) -> LintSettings:
    """The settings, if every code in them exists."""
    check_codes(settings.select, "select")
    check_codes(settings.ignore, "ignore")
    for pattern, codes in settings.per_file_ignores.items():
        check_codes(codes, f"per-file-ignores.{pattern}")
    return settings
