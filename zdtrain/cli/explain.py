"""jsonargparse's messages in one line, with the nearest name that would have been accepted.

This only rewords: whether a configuration is accepted is decided by the parser alone, and a message of an unknown form
is passed on whole.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from zdtrain.records.folder import CONFIG
from zdtrain.suggest import did_you_mean

_UNKNOWN_OPTION = re.compile(
    r"Subcommand '\w+' does not accept option '(?P<key>[^']+)'|unrecognized arguments: (?:--)?(?P<flag>[^= ]+)"
)
_UNKNOWN_INIT_ARG = re.compile(
    r"Problem with given class_path '(?P<path>[^']+)':\s+Option '(?P<key>[^']+)' is not accepted"
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>\S+)")
_UNKNOWN_ATTRIBUTE = re.compile(r"(?:module|package) '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_NO_MODULE = re.compile(r"(?:class_path '(?P<path>[^']+)':\s+)?No module named '(?P<module>[\w.]+)'")
_WRONG_BASE = re.compile(r"(?P<path>\S+ )?does not correspond to a subclass of (?P<base>\w+)")
_WRONG_VALUE = re.compile(r'Parser key "(?P<key>[^"]+)":.*?Expected an? (?P<expected>[^\n]+)', re.S)
_EXPECTED = re.compile(
    r"Expected an? (?!path but)(?:<class ')?([\w.\[\], ]+?)(?:'>)?(?:\. Got value: ([^\n]*))?(?=\n|$)"
)
_CHOICE = re.compile(r"Expected a typing\.Literal\[(?P<choices>[^\]]+)\](?:\. Got value: (?P<value>[^\n]*))?")
_GIVEN = re.compile(r"Given value: (?P<value>[^\n]*)")
_NO_FILE = re.compile(r"Parser key \"config\": (?P<what>File does not exist|Path is not a file): '(?P<path>[^']+)'")
_PLAIN_NAMES = {"NoneType": "null", "collections.abc.Sequence": "list", "collections.abc.Mapping": "dict"}
_REQUIRED = re.compile(r"the following arguments are required: (?P<keys>.+)")


def explain(message: str, parser: ArgumentParser, base_classes: Iterable[type], own_options: Iterable[str] = ()) -> str:
    """Return `message` of `parser` as one line with a remedy.

    Args:
        message: What jsonargparse says, often over several lines.
        parser: The parser of the subcommand, whose options are the known names.
        base_classes: Classes whose subclasses are the known class names.
        own_options: Options that the command has besides.
    """
    if found := _NO_FILE.search(message):
        return _explain_file(found["path"])
    if found := _UNKNOWN_OPTION.search(message):
        key = found["key"] or found["flag"]
        return f"unknown option {key!r}{did_you_mean(key, [*_option_names(parser), *own_options])}"
    if found := _UNKNOWN_INIT_ARG.search(message):
        return _explain_init_arg(found["path"], found["key"])
    if found := _UNKNOWN_CLASS.search(message):
        return f"no class {found['name']!r}{did_you_mean(found['name'], _subclass_names(base_classes))}"
    if found := _UNKNOWN_ATTRIBUTE.search(message):
        hint = did_you_mean(found["name"], _public_names(found["module"]))
        return f"no {found['name']!r} in {found['module']}{hint or _elsewhere(found['module'], found['name'])}"
    if found := _NO_MODULE.search(message):
        hint = _elsewhere(*found["path"].rpartition(".")[::2]) if found["path"] else ""
        return f"no module {found['module']!r}{hint or '; class paths are looked up from the working directory first'}"
    if found := _REQUIRED.search(message):
        keys = [key.partition(".")[2] or key for key in found["keys"].split(", ")]
        return f"missing: {', '.join(keys)}; give a config file that sets it, or --{keys[0]} VALUE"
    if found := _WRONG_VALUE.search(message):
        return _explain_value(message, found)
    return " ".join(message.split())


def _explain_file(path: str) -> str:
    if not Path(path).exists():
        return f"config file does not exist: {path}"
    inside = Path(path) / CONFIG
    hint = f"; did you mean {str(inside)!r}?" if inside.is_file() else ""
    return f"config file is no file: {path}{hint}"


def _explain_init_arg(class_path: str, key: str) -> str:
    block, _, rest = key.partition(".")
    if rest:  # a block that stands beside class_path
        return f"unknown key {block!r} beside class_path{did_you_mean(block, ('init_args', 'dict_kwargs'))}"
    names = _init_names(class_path)
    hint = did_you_mean(key, names) or (f"; it has: {', '.join(names)}" if names else "; it has none")
    return f"{class_path} has no option {key!r}{hint}"


def _explain_value(message: str, found: re.Match[str]) -> str:
    """Say which option it is, what it takes and what it got; an option of a class stands inside that of the class."""
    key, region = found["key"], message[found.start() :]
    if inner := _WRONG_VALUE.search(message, found.end("key")):
        key, region = f"{key}.{inner['key']}", _indented_block(message, inner.start())
    given = _GIVEN.search(region)
    region = region[: given.start() if given else None]
    value = given["value"].strip() if given else ""
    if choices := _CHOICE.findall(region):
        names = ", ".join(dict.fromkeys(names for names, _ in choices))
        value = choices[0][1] or value
        hint = did_you_mean(value, re.findall(r"'([^']+)'", names))
        return f"{key}: expected one of {names}, got {value!r}{hint}"
    if inner is None and (wrong := _WRONG_BASE.search(region)):
        return f"{key}: expected a {wrong['base']}, got {value!r}"
    pairs = _EXPECTED.findall(region)
    expected = dict.fromkeys(_PLAIN_NAMES.get(name, name) for name, _ in pairs)
    got = next((value for _, value in pairs if value), value)
    return f"{key}: expected {' or '.join(expected)}, got {_shortened(got)!r}"


def _indented_block(text: str, start: int) -> str:
    """Return the line at `start`, and those after it that are indented more."""
    first, *rest = text[start:].splitlines()
    margin = start - (text.rfind("\n", 0, start) + 1)
    inside = takewhile(lambda line: len(line) - len(line.lstrip()) > margin, rest)
    return "\n".join([first, *inside])


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def _elsewhere(module: str, name: str) -> str:
    """Return a hint at a class of this name in a loaded module whose own name is like `module`."""
    loaded = [other for other, found in list(sys.modules.items()) if inspect.ismodule(found) and name in dir(found)]
    return did_you_mean(f"{module}.{name}", [f"{other}.{name}" for other in loaded])


def _option_names(parser: ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.dest not in ("help", "print_config")]


def _init_names(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    made = getattr(import_module(module), name)
    callables = made.__mro__ if inspect.isclass(made) else (made,)
    parameters = [p for one in callables if one is not object for p in inspect.signature(one).parameters.values()]
    return list(dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)))


def _public_names(module: str) -> list[str]:
    return [name for name in dir(import_module(module)) if not name.startswith("_")]


def _subclass_names(base_classes: Iterable[Any]) -> Iterator[str]:
    for base in base_classes:
        for subclass in base.__subclasses__():
            yield subclass.__name__
            yield from _subclass_names([subclass])
