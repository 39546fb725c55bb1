"""jsonargparse's messages in one line, with the nearest name that would have been accepted.

This only rewords: whether a configuration is accepted is decided by the parser alone, and a message of an unknown form
is passed on whole.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

from zdtrain.cli.suggest import did_you_mean

_UNKNOWN_OPTION = re.compile(
    r"Subcommand '\w+' does not accept option '(?P<key>[^']+)'|unrecognized arguments: --(?P<flag>[^= ]+)"
)
_UNKNOWN_INIT_ARG = re.compile(
    r"Problem with given class_path '(?P<path>[^']+)':\s+Option '(?P<key>[^']+)' is not accepted"
)
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>\S+)")
_UNKNOWN_ATTRIBUTE = re.compile(r"(?:module|package) '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_WRONG_VALUE = re.compile(r'Parser key "(?P<key>[^"]+)":.*?Expected an? (?P<expected>[^\n]+)', re.S)
_EXPECTED = re.compile(r"Expected an? (?:<class ')?([\w.\[\], ]+?)(?:'>)?(?:\. Got value: ([^\n]*))?(?=\n|$)")
_CHOICE = re.compile(r"Expected a typing\.Literal\[(?P<choices>[^\]]+)\](?:\. Got value: (?P<value>[^\n]*))?")
_GIVEN = re.compile(r"Given value: (?P<value>.*)", re.S)
_NO_FILE = re.compile(r"Parser key \"config\": File does not exist: '(?P<path>[^']+)'")
_REQUIRED = re.compile(r"the following arguments are required: (?P<keys>.+)")


def explain(message: str, parser: ArgumentParser, base_classes: Iterable[type]) -> str:
    """Return `message` of `parser` as one line with a remedy.

    Args:
        message: What jsonargparse says, often over several lines.
        parser: The parser of the subcommand, whose options are the known names.
        base_classes: Classes whose subclasses are the known class names.
    """
    if found := _NO_FILE.search(message):
        return f"config file does not exist: {found['path']}"
    if found := _UNKNOWN_OPTION.search(message):
        key = found["key"] or found["flag"]
        return f"unknown option {key!r}{did_you_mean(key, _option_names(parser))}"
    if found := _UNKNOWN_INIT_ARG.search(message):
        return _explain_init_arg(found["path"], found["key"])
    if found := _UNKNOWN_CLASS.search(message):
        return f"no class {found['name']!r}{did_you_mean(found['name'], _subclass_names(base_classes))}"
    if found := _UNKNOWN_ATTRIBUTE.search(message):
        return f"no {found['name']!r} in {found['module']}{did_you_mean(found['name'], _public_names(found['module']))}"
    if found := _REQUIRED.search(message):
        keys = [key.partition(".")[2] or key for key in found["keys"].split(", ")]
        return f"missing: {', '.join(keys)}; give a config file that sets it, or --{keys[0]} VALUE"
    if found := _WRONG_VALUE.search(message):
        return _explain_value(message, found)
    return " ".join(message.split())


def _explain_init_arg(class_path: str, key: str) -> str:
    block, _, rest = key.partition(".")
    if rest:  # a block that stands beside class_path
        return f"unknown key {block!r} beside class_path{did_you_mean(block, ('init_args', 'dict_kwargs'))}"
    return f"{class_path} has no option {key!r}{did_you_mean(key, _init_names(class_path))}"


def _explain_value(message: str, found: re.Match[str]) -> str:
    """Say which option it is, what it takes and what it got; an option of a class stands inside that of the class."""
    key, region = found["key"], message[found.start() :]
    if inner := _WRONG_VALUE.search(region, found.end("key") - found.start()):
        key, region = f"{key}.{inner['key']}", inner[0]
    if choices := _CHOICE.findall(message, found.start()):
        names = ", ".join(dict.fromkeys(names for names, _ in choices))
        given = _GIVEN.search(message)
        value = choices[0][1] or (given["value"].strip() if given else "")
        hint = did_you_mean(value, re.findall(r"'([^']+)'", names))
        return f"{key}: expected one of {names}, got {value!r}{hint}"
    pairs = _EXPECTED.findall(region)
    expected = dict.fromkeys(name.replace("NoneType", "null") for name, _ in pairs)
    given = _GIVEN.search(message)
    got = next((value for _, value in pairs if value), given["value"].strip() if given else "")
    return f"{key}: expected {' or '.join(expected)}, got {got!r}"


def _option_names(parser: ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.dest not in ("help", "print_config")]


def _init_names(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    made = getattr(import_module(module), name)
    callables = made.__mro__ if inspect.isclass(made) else (made,)
    return [name for one in callables for name in inspect.signature(one).parameters]


def _public_names(module: str) -> list[str]:
    return [name for name in dir(import_module(module)) if not name.startswith("_")]


def _subclass_names(base_classes: Iterable[Any]) -> Iterator[str]:
    for base in base_classes:
        for subclass in base.__subclasses__():
            yield subclass.__name__
            yield from _subclass_names([subclass])
