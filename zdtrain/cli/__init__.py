"""The `zdtrain` command; a subcommand is imported when it is run, so that `zdtrain lint` loads no torch.

Exit codes: 0 done, 1 training or exporting failed, 2 wrong usage or configuration, 130 interrupted with Ctrl-C.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from zdtrain import __version__
from zdtrain.errors import ConfigError, ZDTrainError
from zdtrain.suggest import did_you_mean

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: where its function is (``"module:function"``, taking the arguments, returning the exit code)."""

    target: str
    help: str

    def load(self) -> Callable[[list[str]], int]:
        """Import and return the function."""
        module, function = self.target.split(":")
        loaded: Callable[[list[str]], int] = getattr(import_module(module), function)
        return loaded


COMMANDS = {
    "fit": Command("zdtrain.cli.training:fit", "train a model"),
    "validate": Command("zdtrain.cli.training:validate", "run validation once"),
    "test": Command("zdtrain.cli.training:test", "run the test set once"),
    "predict": Command("zdtrain.cli.training:predict", "predict on a data set"),
    "check": Command("zdtrain.check.cli:main", "find what would make a GPU wait, on a machine without one"),
    "bench": Command("zdtrain.cli.bench:main", "time steps of a model: stock Lightning, zdtrain, captured, lowered"),
    "export": Command("zdtrain.cli.export:main", "write a trained model into a file that torch alone runs"),
    "lint": Command("zdtrain.lint.cli:main", "find host reads and what a capture gets wrong, from source alone"),
    "rule": Command("zdtrain.lint.cli:rule_main", "explain a rule of the linter"),
    "runs": Command("zdtrain.cli.runs:main", "list recorded runs"),
    "report": Command("zdtrain.cli.report:main", "write a page with the curves of one run, or of several compared"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (``sys.argv[1:]`` by default) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help"):
        print(_usage(), file=sys.stdout if name else sys.stderr)
        return EXIT_OK if name else EXIT_USAGE
    if name == "--version":
        print(f"zdtrain {__version__}")
        return EXIT_OK
    try:
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)} (zdtrain --help lists all)")
        status = COMMANDS[name].load()(arguments[1:])
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read our output has seen enough: `zdtrain check ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ZDTrainError as error:
        return report_error(error, EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)
    except KeyboardInterrupt:
        print("zdtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def report_error(error: BaseException, code: int, note: str = "") -> int:
    """Print `error` in one line on stderr, with the traceback if ``ZDTRAIN_TRACEBACK=1``; return `code`."""
    if os.environ.get("ZDTRAIN_TRACEBACK") == "1":
        traceback.print_exception(error)
    prefix = "" if isinstance(error, ZDTrainError) else f"{type(error).__name__}: "
    message = " ".join(str(error).split())
    print(f"zdtrain: error: {prefix}{message}{note}", file=sys.stderr)
    return code


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: zdtrain COMMAND [ARGUMENTS]", "", "commands:", *lines, "", "zdtrain COMMAND --help explains each."]
    )
