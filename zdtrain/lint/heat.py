"""How often code runs: once per training step, once in an interval, in evaluation, or hardly ever."""

import ast
import enum
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import lru_cache

from zdtrain.lint.source import Function, Source


class Heat(enum.IntEnum):
    """How often a line runs. The higher, the more a host read in it costs."""

    COLD = 0
    """Nothing in sight runs it once per step."""
    RARE = 1
    """Set-up, once per epoch, or on the way out of the loop."""
    EVALUATION = 2
    """Validation, test or prediction."""
    GATED = 3
    """In a training step, but under an interval."""
    LOOP = 4
    """Once per training step, in a loop somebody wrote or in a hook around the step."""
    STEP = 5
    """Once per training step, in code that a capture would record."""

    @property
    def hot(self) -> bool:
        """Whether it runs once per step."""
        return self >= Heat.LOOP


STEP_HOOKS = frozenset(
    [
        "training_step",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "backward",
        "training_step_end",
        "compute_loss",
    ]
)
LOOP_HOOKS = frozenset(
    [
        "on_train_batch_start",
        "on_train_batch_end",
        "optimizer_step",
        "optimizer_zero_grad",
        "train_step",
        "train_batch",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
    ]
)
_EVALUATION = re.compile(
    r"(?:^|_)(?:eval|evaluate|evaluation|valid|validate|validation|val|test|tests|testing|infer|inference|predict|"
    r"prediction|visuali[sz]e|visuali[sz]ation|vis|plot|show|demo|export|benchmark|generate|sample_images)(?:_|$)|"
    r"^estimate_loss$|_eval$"
)
_RARE = re.compile(
    r"^__(?!call__|getitem__)\w+__$|^(?:setup|teardown|prepare_data|configure_\w+|state_dict|load\w*|save\w*|"
    r"\w+_dataloader|build\w*|make_\w+|create_\w+|get_\w*args?\w*|parse\w*|init\w*|reset\w*|extra_repr|"
    r"on_\w*(?:epoch|fit|checkpoint|train)_(?:start|end)|on_fit_\w+|main|compute|log_images|"
    r"\w*epoch_end)$"
)
_EPOCH = re.compile(r"epoch|^ep$|^e$", re.IGNORECASE)
_LOADER = re.compile(
    r"loader|(?:^|_)dl$|(?:^|_)dls?$|batches|data_?iter|(?:train|training|valid|val|test|eval)(?:_|ing_)?(?:data|set|iter)|"
    r"dataset|prefetcher",
    re.IGNORECASE,
)
_TICK = re.compile(r"^(?:i|it|n|idx|ix|j|k|t)$|step|iter|batch(?!_size)|count|nimg|tick|update", re.IGNORECASE)
_NO_TICK = re.compile(r"optim|rank|epoch|phase|size", re.IGNORECASE)
_GATE = re.compile(
    r"^(?:is_|do_|should_|will_|need_|time_to_|to_)?(?:log|print|save|eval|evaluate|validate|sample|display|plot|visualize|"
    r"checkpoint|report|snapshot|record|refresh)(?:_\w*)?(?:now|step|iter|batch|time|flag)$|"
    r"^should_(?:log|print|save|eval|validate|stop|sample|report)|is_last|last_batch|last_step|divisible|every_n|^every$|"
    r"is_(?:log|logging|console|metric|print|eval|save)\w*_(?:step|iter|batch)",
    re.IGNORECASE,
)
_LAST_TIME = re.compile(r"(?:^|_)(?:last|prev|previous)(?:_|$)", re.IGNORECASE)
_TRANSFORM = re.compile(
    r"Crop|Resize|Flip|Jitter|Transform$|Transforms$|Erasing|ToTensor|Augment|RandomAffine|Patchify"
)
_LEAVING = frozenset({"sys.exit", "exit", "quit", "os._exit", "sys.abort", "os.abort"})


def root_heat(function: Function, source: Source) -> Heat:
    """How often a function runs by its own name and class, before calls are followed."""
    owner = function.owner
    name = function.name
    if name in STEP_HOOKS and owner is not None and not owner.has_base("Function"):
        return Heat.STEP
    if owner is not None and source.is_module(owner) and name == "forward":
        return Heat.RARE if _TRANSFORM.search(owner.name) else Heat.STEP
    if owner is not None and owner.has_base("Metric") and name == "update":
        return Heat.STEP
    if name in LOOP_HOOKS or (owner is not None and name == "step" and owner.has_base("Optimizer")):
        return Heat.LOOP
    if is_evaluation(name):
        return Heat.EVALUATION
    if not name or _is_rare(name):
        return Heat.RARE
    if _steps_outside_loops(function, source):
        return Heat.LOOP
    return Heat.COLD


@lru_cache(4096)
def is_evaluation(name: str) -> bool:
    """Whether a function's name says that it evaluates."""
    found = _EVALUATION.search(name)
    return found is not None and "train" not in name[: found.start()]


@lru_cache(4096)
def _is_rare(name: str) -> bool:
    return _RARE.search(name) is not None


def _steps_outside_loops(function: Function, source: Source) -> bool:
    """A function that takes one training step itself and is looped over elsewhere."""
    first, last = function.span
    steps = within(source.step_lines[0], first, last)
    if not steps or not function.name:
        return False
    inner = [child.span for child in function.nested.values()]
    loops = [(loop.lineno, loop.end_lineno or loop.lineno) for loop in function.loops]
    return any(not _inside(line, inner) and not _inside(line, loops) for line in steps)


def within(lines: list[int], first: int, last: int) -> list[int]:
    """Those of `lines`, which are in order, from `first` to `last`."""
    return lines[bisect_left(lines, first) : bisect_left(lines, last + 1)] if lines else lines


def _inside(line: int, spans: Iterable[tuple[int, int]]) -> bool:
    return any(first <= line <= last for first, last in spans)


def names_in(node: ast.AST) -> list[str]:
    """Every identifier in an expression, attributes included."""
    found: list[str] = []
    for child in ast.walk(node):
        if child.__class__ is ast.Name:
            found.append(child.id)
        elif child.__class__ is ast.Attribute:
            found.append(child.attr)
    return found


class Loops:
    """Which loops of a function run once per training step."""

    def __init__(self, function: Function, source: Source) -> None:
        self._steps, self._environments = source.step_lines
        self._function = function
        self._children: dict[ast.stmt, list[ast.stmt]] = {loop: [] for loop in function.loops}
        for loop in function.loops:
            for other in function.loops:
                if other is not loop and loop.lineno <= other.lineno <= (loop.end_lineno or 0):
                    self._children[loop].append(other)

    def heat(self, loop: ast.For | ast.AsyncFor | ast.While) -> Heat:
        """LOOP, EVALUATION for a pass over a loader that trains nothing, or COLD."""
        training = "train" in self._function.name and not is_evaluation(self._function.name)
        if self._trains(loop):
            return Heat.COLD if self._is_outer(loop) else Heat.LOOP
        if is_loader_loop(loop):
            return Heat.LOOP if training and not self._is_outer(loop) else Heat.EVALUATION
        return Heat.COLD

    def _trains(self, loop: ast.stmt) -> bool:
        last = loop.end_lineno or loop.lineno
        return bool(within(self._steps, loop.lineno, last) or within(self._environments, loop.lineno, last))

    def _is_outer(self, loop: ast.stmt) -> bool:
        """A loop over epochs, or around a loop over batches or environment steps."""
        if any(_EPOCH.search(name) for name in _header_names(loop)):
            return True
        for child in self._children[loop]:
            last = child.end_lineno or child.lineno
            if within(self._environments, child.lineno, last):
                return True
            if self._trains(child) and (is_loader_loop(child) or any(map(_EPOCH.search, _header_names(child)))):
                return True
        return False


def _header_names(loop: ast.stmt) -> list[str]:
    if isinstance(loop, ast.While):
        return names_in(loop.test)
    assert isinstance(loop, ast.For | ast.AsyncFor)
    names = names_in(loop.target)
    is_range = isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range"
    return names + (names_in(loop.iter) if is_range else [])


def is_loader_loop(loop: ast.stmt) -> bool:
    """Whether a loop goes over batches, by the name of what it iterates."""
    return isinstance(loop, ast.For | ast.AsyncFor) and any(_LOADER.search(name) for name in names_in(loop.iter))


def is_interval(test: ast.expr, is_gate_name: Callable[[str], bool]) -> bool:
    """Whether a condition is true once in an interval: ``step % 50 == 0``, the last batch, …."""
    if isinstance(test, ast.BoolOp):
        any_or_all = all if isinstance(test.op, ast.Or) else any
        return any_or_all(is_interval(value, is_gate_name) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = test.operand
        return isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod)
    if isinstance(test, ast.Compare):
        return _is_interval_compare(test)
    if isinstance(test, ast.Name):
        return is_gate_name(test.id) or bool(_GATE.search(test.id))
    if isinstance(test, ast.Attribute):
        return bool(_GATE.search(test.attr))
    if isinstance(test, ast.Call):
        name = test.func.attr if isinstance(test.func, ast.Attribute) else getattr(test.func, "id", "")
        return bool(_GATE.search(name))
    return False


def _is_interval_compare(test: ast.Compare) -> bool:
    operator = test.ops[0]
    sides = [test.left, *test.comparators]
    modulo = any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in sides)
    if modulo:
        return not isinstance(operator, ast.NotEq)
    if (
        isinstance(operator, ast.Gt | ast.GtE)
        and isinstance(test.left, ast.BinOp)
        and isinstance(test.left.op, ast.Sub)
    ):
        return any(_LAST_TIME.search(name) for name in names_in(test.left))  # now - last_time > interval
    if not isinstance(operator, ast.Eq):
        return False
    ticks = names_in(test.left)
    return bool(ticks) and any(map(_TICK.search, ticks)) and not any(map(_NO_TICK.search, ticks))


def skips_most_steps(test: ast.expr, is_gate_name: Callable[[str], bool]) -> bool:
    """Whether ``if test: continue`` leaves what follows for once in an interval."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_interval(test.operand, is_gate_name)
    if isinstance(test, ast.BoolOp):
        return any(skips_most_steps(value, is_gate_name) for value in test.values)
    if isinstance(test, ast.BinOp):
        return isinstance(test.op, ast.Mod)
    if isinstance(test, ast.Compare):
        sides = [test.left, *test.comparators]
        if isinstance(test.ops[0], ast.NotEq | ast.Gt):
            return any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) for side in sides)
        if isinstance(test.ops[0], ast.Lt | ast.LtE):
            bound = test.comparators[0]
            return (
                isinstance(bound, ast.BinOp)
                and isinstance(bound.op, ast.Add)
                and any(map(_TICK.search, names_in(bound)))
            )
    return False


def leaves_loop(body: list[ast.stmt], source: Source, *, in_loop: bool) -> bool:
    """Whether a block ends the loop or the program."""
    last = body[-1]
    if isinstance(last, ast.Raise | ast.Break):
        return True
    if isinstance(last, ast.Return):
        return in_loop
    return (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and source.dotted(last.value.func) in _LEAVING
    )


def takes_step(body: list[ast.stmt], source: Source, loop: ast.stmt | None) -> bool:
    """Whether a block under an interval is the optimizer step itself, as with gradient accumulation.

    It is not if the loop around it also steps an optimizer outside the block: then it is an extra step, now and then.
    """
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    if loop is not None:
        all_steps = within(source.optimizer_lines, loop.lineno, loop.end_lineno or loop.lineno)
        if any(not first <= line <= last for line in all_steps):
            return False
    return bool(within(source.step_lines[0], first, last)) or any(
        ".zero_grad(" in line for line in source.lines[first - 1 : last]
    )


def is_evaluation_test(test: ast.expr) -> bool:
    """``if not self.training``."""
    return (
        isinstance(test, ast.UnaryOp)
        and isinstance(test.op, ast.Not)
        and isinstance(test.operand, ast.Attribute)
        and test.operand.attr == "training"
    )
