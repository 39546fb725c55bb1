"""Host values past the module that a step's code reads: globals, closures, options, what the Trainer knows.

A program holds them by value. Which ones there are is learned while a step is watched, from the user's functions that
ran; from then on they are part of the key. What has no value to compare (a clock, a loop's counters) is refused.
"""

import cProfile
import dis
import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from zdtrain.capture import roots
from zdtrain.capture.effects import effect_of
from zdtrain.capture.frozen import frozen
from zdtrain.capture.guards import GONE, Guards
from zdtrain.capture.remedies import INSTEAD_OF_READING_OPTIONS
from zdtrain.capture.roots import Root
from zdtrain.capture.watch import Watch, reason_at
from zdtrain.errors import FallbackReason
from zdtrain.source.location import NOWHERE, Location, code_kind, is_users

# Attributes of the Trainer that a program may hold by value.
SERVED = frozenset(
    {
        *("is_last_batch", "should_stop", "sanity_checking", "validating", "testing", "datamodule"),
        *("num_training_batches", "num_val_batches", "num_test_batches", "estimated_stepping_batches"),
        *("max_epochs", "max_steps", "accumulate_grad_batches", "log_every_n_steps", "val_dataloaders"),
        "test_dataloaders",
    }
)
# Attributes of it, its loops and schedulers that are others in every step.
REFUSED = frozenset(
    {
        *("fit_loop", "epoch_loop", "batch_progress", "epoch_progress", "optim_progress", "total_batch_idx"),
        *("progress_bar_metrics", "lr_scheduler_configs", "get_last_lr", "last_epoch", "_last_lr"),
        *("train_dataloader", "callbacks"),
    }
)
BY_NAME = frozenset({"globals", "vars", "getattr", "modules", "import_module", "__import__"})  # look names up in text
MAX_DOTS = 3  # in ``torch.nn.functional.relu``
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})


@dataclass(slots=True)
class Uses:
    """What the code of one function reads, by its line."""

    names: dict[str, int] = field(default_factory=dict)
    """Globals, and variables of functions around."""
    attributes: dict[str, int] = field(default_factory=dict)
    """Attributes of whatever objects."""
    modules: dict[str, int] = field(default_factory=dict)
    """Modules that it imports, dots of the package in front."""
    texts: dict[str, int] = field(default_factory=dict)
    """What may name globals or modules, too, where the code looks names up that are in text."""


class Reach:
    """The values past the module that watched steps read.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._roots: dict[Hashable, Root] = {}
        self._uses: dict[int, tuple[CodeType, Uses]] = {}
        self._ran: set[int] = set()
        self._before: dict[Hashable, Hashable] = {}
        self._watch: Watch | None = None
        self._met: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # functions with variables of others, in this step
        self._lasting: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # and in earlier ones: not made in every step

    def __reduce__(self) -> tuple[Any, ...]:
        return Reach, (self._trainer,)  # code that ran in this process cannot be pickled

    def __len__(self) -> int:
        return len(self._roots)

    def values(self) -> tuple[Hashable, ...]:
        """Return all of them, comparable by equality."""
        return tuple([root.read() for root in self._roots.values()])

    def guard(self, guards: Guards) -> None:
        """Let `guards` look at all of them."""
        for root in self._roots.values():
            root.guard(guards)

    def changes(self, before: Sequence[Hashable], after: Sequence[Hashable]) -> Iterator[FallbackReason]:
        """Yield a reason for each value that is different."""
        for root, old, new in zip(self._roots.values(), before, after, strict=False):
            if old != new:
                what = f"{root.label} is changed between steps; {root.instead}"
                yield reason_at(root.place, "python-state", what)

    def differing(self, before: Sequence[Hashable], after: Sequence[Hashable]) -> Iterator[str]:
        """Yield the names of values that are different."""
        roots = zip(self._roots.values(), before, after, strict=False)
        yield from (root.label for root, old, new in roots if old != new)

    @contextmanager
    def looking(self, watch: Watch) -> Iterator[None]:
        """Learn what the body reads, and tell the watch what it changes or what cannot be served."""
        self._watch = watch
        self._ran = set()
        self._before = {key: root.read() for key, root in self._roots.items()}
        profile: Any = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            if isinstance(profile, cProfile.Profile):  # it is set from C, and no function that Python could set
                profile.enable()
            else:
                sys.setprofile(profile)
        self._lasting |= self._met
        for key, root in self._roots.items():
            if root.read() != self._before[key]:
                what = f"{root.label} is changed by the step, which a replay would not"
                watch.reads.append(reason_at(root.place, "python-state", what))

    def take_elsewhere(self, reads: Iterable[tuple[nn.Module, str]]) -> None:
        """Take in what a step reads of modules that are not part of its own: attributes, parameters, hooks.

        Args:
            reads: Such modules, and names of theirs.
        """
        for module, name in reads:
            label = f"{name!r} of a {type(module).__name__} that is held past the module"
            held = vars(module)
            holders = (held, *(held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")))
            root = Root(label, NOWHERE, roots.part_reader(module, name), holders, name)
            if root.read() is not GONE:
                self._roots.setdefault((id(module), name), root)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_call"):
            return
        effect = effect_of(frame, event, argument)
        if effect is not None:
            self._refuse(effect.frame, effect.frame.f_lineno, effect.code, effect.message)
        if event == "c_call" or code_kind(code) not in ("user", "third-party"):
            return
        if id(code) not in self._ran or code.co_freevars:
            self._ran.add(id(code))
            self._harvest(frame)

    def _refuse(self, frame: FrameType, line: int, code: str, message: str) -> None:
        assert self._watch is not None
        self._watch.reads.append(reason_at(_place(frame, line), code, message))

    def _harvest(self, frame: FrameType) -> None:
        """Take in what the function that is being called can read."""
        code = frame.f_code
        if id(code) not in self._uses:
            self._uses[id(code)] = (code, uses_of(code))
        uses = self._uses[id(code)][1]
        if code_kind(code) == "user":
            for name, line in {**uses.texts, **uses.names}.items():
                if name in frame.f_globals and name not in code.co_freevars:
                    self._take_global(frame, line, name, uses)
            for name, line in {**uses.texts, **uses.modules}.items():
                self._take_import(frame, line, name, uses)
            if "trainer" in uses.attributes:
                self._take_from_trainer(frame, uses)
            self._take_cells(frame, uses)
            self._take_class_attributes(frame, uses)
            self._take_defaults(frame)
        for name in uses.attributes.keys() & REFUSED:
            what = f"the step reads {name!r}, which is another one in every step and which a replay does not see"
            self._refuse(frame, uses.attributes[name], "trainer-state", what)
        trainer, lines = self._trainer, {**uses.names, **uses.attributes}
        for name in uses.attributes.keys() & SERVED:
            read = roots.attribute_reader(trainer, name)
            self._add(("trainer", name), f"trainer.{name}", frame, lines[name], read)
        for name in lines.keys() & ENVIRONMENT:
            self._add("environment", "a variable of the environment", frame, lines[name], roots.read_environment)
        if "param_groups" in uses.attributes:
            for index, optimizer in enumerate(trainer.optimizers):
                label = f"an option of the param_groups of optimizer {index}"
                read = roots.options_reader(optimizer)
                self._add(
                    ("options", id(optimizer)),
                    label,
                    frame,
                    lines["param_groups"],
                    read,
                    instead=INSTEAD_OF_READING_OPTIONS,
                )

    def _take_global(self, frame: FrameType, line: int, name: str, uses: Uses) -> None:
        scope, value = frame.f_globals, frame.f_globals[name]
        if isinstance(value, ModuleType):
            self._take_module(frame, line, name, value, uses)
            return
        read = roots.item_reader(scope, name)
        self._add((id(scope), name), f"the global {name!r}", frame, line, read, holders=(scope,), name=name)
        self._take_class(frame, line, name, value, uses)

    def _take_class(self, frame: FrameType, line: int, path: str, value: Any, uses: Uses) -> None:
        """Take in what is read of a class of the user's, where `value` is one."""
        if not (isinstance(value, type) and is_users(value)):
            return
        for attribute in uses.attributes:
            if roots.is_state(getattr(value, attribute, None)):
                read = roots.attribute_reader(value, attribute)
                holders = tuple(vars(kind) for kind in value.__mro__)
                label = f"{path}.{attribute}"
                self._add((id(value), attribute), label, frame, line, read, holders=holders, name=attribute)

    def _take_import(self, frame: FrameType, line: int, name: str, uses: Uses) -> None:
        """Take in what is read of a module that the function imports."""
        level = len(name) - len(name.lstrip("."))
        package = str(frame.f_globals.get("__package__") or "").split(".")
        path = ".".join([*package[: len(package) + 1 - level], name[level:]]).strip(".") if level else name
        for part in (path.partition(".")[0], path):
            module = sys.modules.get(part)
            if isinstance(module, ModuleType):
                self._take_module(frame, line, part.rpartition(".")[2], module, uses)

    def _take_from_trainer(self, frame: FrameType, uses: Uses) -> None:
        """Take in what users gave the Trainer besides its own attributes, now or later."""
        held = vars(self._trainer)
        for name, line in uses.attributes.items():
            if not hasattr(type(self._trainer), name) and (name not in held or roots.is_state(held[name])):
                read = roots.item_reader(held, name)
                self._add(("given", name), f"trainer.{name}", frame, line, read, holders=(held,), name=name)

    def _take_module(self, frame: FrameType, line: int, path: str, module: ModuleType, uses: Uses) -> None:
        """Take in the functions that are read of a Python module, and of the user's own modules all values."""
        names = vars(module)
        for name in uses.attributes.keys() & names.keys():
            value, label = names[name], f"{path}.{name}"
            if isinstance(value, ModuleType):
                if path.count(".") < MAX_DOTS:
                    self._take_module(frame, line, label, value, uses)
            elif callable(value) or (is_users(module) and roots.is_state(value)):
                read = roots.item_reader(names, name)
                self._add((id(module), name), label, frame, line, read, holders=(names,), name=name)

    def _take_cells(self, frame: FrameType, uses: Uses) -> None:
        """Take in the variables of the functions around, but for those that the step itself makes."""
        code = frame.f_code
        outer = [name for name in code.co_freevars if name != "__class__" and not _is_local(frame, name)]
        if not outer:
            return
        for function in gc.get_referrers(code):
            if not isinstance(function, FunctionType) or function.__code__ is not code:
                continue
            for name in code.co_freevars:
                self._met.add(function)
                if name in outer and function in self._lasting:
                    label = f"the variable {name!r} of a function around the step"
                    line = uses.names.get(name, code.co_firstlineno)
                    key = (weakref.ref(function), name)
                    self._add(key, label, frame, line, roots.cell_reader(function, name))

    def _take_class_attributes(self, frame: FrameType, uses: Uses) -> None:
        """Take in what a method reads of its class and not of the instance."""
        owner = _first_argument(frame)
        cls, own = (owner, {}) if isinstance(owner, type) else (type(owner), getattr(owner, "__dict__", {}))
        code = frame.f_code
        for kind in filter(is_users, cls.__mro__):
            itself = {name: code.co_firstlineno for name, value in vars(kind).items() if _code_of(value) is code}
            lines = {**itself, **uses.attributes}
            for name in lines.keys() & vars(kind).keys():
                if name not in own:
                    label = f"{kind.__name__}.{name}"
                    read, holders = roots.class_reader(cls, name), tuple(vars(base) for base in cls.__mro__)
                    self._add((id(cls), name), label, frame, lines[name], read, holders=holders, name=name)
                    self._take_class(frame, lines[name], label, vars(kind)[name], uses)

    def _take_defaults(self, frame: FrameType) -> None:
        """Take in default arguments that can be changed in place."""
        code = frame.f_code
        function = getattr(_first_argument(frame), code.co_name, None) or frame.f_globals.get(code.co_name)
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__code__ is not code:
            return
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if roots.is_state(value) and not isinstance(value, roots.NUMBERS):
                label = f"a default argument of {code.co_qualname}"
                self._add(id(value), label, frame, code.co_firstlineno, partial(frozen, value))

    def _add(
        self,
        key: Hashable,
        label: str,
        frame: FrameType,
        line: int,
        read: Callable[[], Hashable],
        *,
        holders: tuple[Mapping[str, Any], ...] = (),
        name: str = "",
        instead: str = roots.FILL_A_TENSOR,
    ) -> None:
        if key not in self._roots:
            self._roots[key] = Root(label, _place(frame, line), read, holders, name, instead)
            self._before[key] = read()


def uses_of(code: CodeType) -> Uses:
    """Return the names from outside and the attributes that `code` loads, with their first line."""
    uses, line, level = Uses(), code.co_firstlineno, 0
    texts: dict[str, int] = {}
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        line = (positions.lineno if positions else None) or line
        if instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")):
            uses.names.setdefault(instruction.argval, line)
        elif instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")):
            uses.attributes.setdefault(instruction.argval, line)
        elif instruction.opname == "IMPORT_NAME":
            uses.modules.setdefault("." * level + instruction.argval, line)
        elif instruction.opname.startswith("LOAD_CONST") and isinstance(instruction.argval, str):
            texts.setdefault(instruction.argval, line)
        elif instruction.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and isinstance(instruction.argval, int):
            level = int(instruction.argval)  # the dots of an import come just before it
    if BY_NAME & {*uses.names, *uses.attributes}:
        uses.texts = uses.attributes = {**texts, **uses.attributes}
    return uses


def _place(frame: FrameType, line: int) -> Location:
    return Location(frame.f_code.co_filename, line, frame.f_code.co_qualname)


def _first_argument(frame: FrameType) -> Any:
    """Return what a method is called on."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _is_local(frame: FrameType, name: str) -> bool:
    """Return whether a function that runs further out holds the variable: then it is made anew in every step."""
    outer = frame.f_back
    while outer is not None:
        if name in outer.f_code.co_cellvars and outer.f_locals.get(name) is frame.f_locals.get(name):
            return True
        outer = outer.f_back
    return False


def _code_of(value: Any) -> CodeType | None:
    return getattr(getattr(value, "__func__", value), "__code__", None)
