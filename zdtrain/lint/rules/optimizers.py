# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD301, ZD307-ZD309, ZD311, ZD312: optimizers and schedulers."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Severity
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import Rule, Scope, owner_of, short
from zdtrain.lint.source import Function

_HYPERPARAMETERS = frozenset({"lr", "weight_decay", "momentum", "betas", "eps"})


class LearningRateReplaced(Rule):
    """Finds `group["lr"] = x` and its like in a step: the value is replaced, not written in place.

    ## Why
    A captured step reads the tensor that was there when it was captured. With a Python number the new rate is
    simply not seen.

    ## Example
    ```python
    class Net(L.LightningModule):
        def on_before_optimizer_step(self, optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * self.decay
    ```

    ## Use instead
    A schedule, or the tensor in place: `SimpleAdam` keeps `lr` and `weight_decay` as device scalars.
    ```python
    class Net(L.LightningModule):
        def on_before_optimizer_step(self, optimizer):
            for group in optimizer.param_groups:
                group["lr"].mul_(self.decay)
    ```

    ## When to allow
    In a loop of your own that is not captured.
    """

    code = "ZD301"
    name = "lr-replaced"
    severity = Severity.WARNING
    scope = Scope.STEP
    statements = (ast.Assign, ast.AugAssign)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if not (isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)):
                continue
            if target.slice.value in _HYPERPARAMETERS and "group" in short(target.value, 200):
                flow.report(
                    self, target, f"`{short(target)}` is replaced; a captured step keeps the old one: fill it in place"
                )


class UnfusedOptimizer(Rule):
    """Finds `torch.optim.Adam`/`AdamW` made neither `fused` nor `capturable`.

    ## Why
    Its step counts and rates are Python numbers, so it can't be captured, and it launches many small kernels.

    ## Example
    ```python
    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    ```

    ## Use instead
    `zdtrain.optim.SimpleAdam`, or the fused form.
    ```python
    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ```

    ## When to allow
    On the CPU, and where memory or an old checkpoint asks for it.
    """

    code = "ZD307"
    name = "unfused-optimizer"
    severity = Severity.NOTE
    scope = Scope.ANYWHERE
    functions = (
        "torch.optim.Adam",
        "torch.optim.AdamW",
        "torch.optim.NAdam",
        "torch.optim.RAdam",
        "torch.optim.Adamax",
    )

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if any(item.arg in ("fused", "capturable", None) for item in node.keywords):
            return
        flow.report(
            self, node, f"`{name}` keeps step counts on the host; use SimpleAdam, fused=True or capturable=True"
        )


class TensorRateRead(Rule):
    """Finds a tensor learning rate given to an optimizer that reads it in every step.

    ## Why
    `SGD` and the default form of the others compute with `-lr` as a Python number: one host read per step.

    ## Example
    ```python
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    ```

    ## Use instead
    The fused form takes a tensor as it is; so does `SimpleAdam`.
    ```python
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), fused=True)
    ```

    ## When to allow
    On the CPU.
    """

    code = "ZD308"
    name = "tensor-rate-read"
    severity = Severity.WARNING
    scope = Scope.ANYWHERE
    functions = (
        "torch.optim.SGD",
        "torch.optim.Adam",
        "torch.optim.AdamW",
        "torch.optim.RMSprop",
        "torch.optim.Adagrad",
    )
    triggers = (r"optim\.\w+\(",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        rate = keyword(node, "lr") or (node.args[1] if len(node.args) > 1 else None)
        fast = any(is_constant(keyword(node, flag), True) for flag in ("fused", "capturable"))
        if rate is not None and flow.kind(rate) & k.TENSOR and not fast:
            flow.report(self, node, f"`{name}` reads a tensor lr in every step; pass fused=True, or use SimpleAdam")


class PlateauRead(Rule):
    """Finds `ReduceLROnPlateau.step(tensor)` in a step.

    ## Why
    It compares the metric with the best one in Python.

    ## Example
    ```python
    def train(model, loader, optimizer):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
    ```

    ## Use instead
    Once per epoch, with a number that has been read anyway; or a `Plateau` monitor.
    ```python
    def train(model, loader, optimizer):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step(loss)
    ```

    ## When to allow
    Once per epoch.
    """

    code = "ZD309"
    name = "plateau-read"
    methods = ("step",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if owner is None or not (flow.kind(owner) & k.SCHEDULER or "sched" in short(owner).lower()):
            return
        if node.args and k.is_device_value(flow.kind(node.args[0])):
            flow.report(
                self, node, f"`{short(owner)}.step({short(node.args[0])})` reads the metric; step it once per epoch"
            )


class BackwardInStep(Rule):
    """Finds `loss.backward()` in the training_step of a LightningModule.

    ## Why
    With automatic optimization the trainer calls backward itself, so this is a second one. With manual optimization
    `self.manual_backward(loss)` is the call that knows precision, strategy and accumulation.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            loss.backward()
            return loss
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## When to allow
    Never.
    """

    code = "ZD311"
    name = "backward-in-step"
    severity = Severity.ERROR
    scope = Scope.ANYWHERE
    methods = ("backward",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if flow.function.name == "training_step" and flow.owner is not None:
            flow.report(
                self, node, "return the loss, or call `self.manual_backward(loss)` with automatic_optimization = False"
            )


class ManualOptimizationUnset(Rule):
    """Finds manual optimization in a module that does not switch automatic optimization off.

    ## Why
    The trainer then steps the optimizers as well.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self.layer(batch[0]), batch[1]))
            optimizer.step()
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self.layer(batch[0]), batch[1]))
            optimizer.step()
    ```

    ## When to allow
    When a base class in another file does it.
    """

    code = "ZD312"
    name = "manual-optimization-unset"
    severity = Severity.WARNING
    scope = Scope.ANYWHERE

    def check_function(self, function: Function, flow: Walk) -> None:
        if function.name != "training_step" or function.owner is None or "automatic_optimization" in flow.source.text:
            return
        segment = flow.source.segment(function)
        if "self.manual_backward(" in segment:
            flow.report(self, function.node, "set `self.automatic_optimization = False` for manual optimization")


RULES = (
    LearningRateReplaced,
    UnfusedOptimizer,
    TensorRateRead,
    PlateauRead,
    BackwardInStep,
    ManualOptimizationUnset,
)
