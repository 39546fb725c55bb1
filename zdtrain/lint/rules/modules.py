# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD501-ZD504, ZD514: what a module registers and keeps."""

import ast
import re
from collections.abc import Iterator

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Severity
from zdtrain.lint.rules.base import AnywhereRule, Scope, owner_of, short
from zdtrain.lint.source import Function


def _self_targets(node: ast.stmt) -> Iterator[str]:
    """Names of attributes of ``self`` that an assignment sets."""
    for target in (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    ):
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            yield target.attr


def _in_constructor(flow: Walk) -> bool:
    return flow.function.name == "__init__" and flow.owner is not None and flow.source.is_module(flow.owner)


class TensorAttribute(AnywhereRule):
    """Finds a plain tensor assigned to a module in its constructor.

    ## Why
    It does not move with `.to(device)`, is not saved in checkpoints and does not train.

    ## Example
    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(16)
    ```

    ## Use instead
    `register_buffer`, or `nn.Parameter` if it should train.
    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(16))
    ```

    ## When to allow
    For a tensor that belongs in host memory, such as a table the loader uses.
    """

    code = "ZD501"
    name = "tensor-attribute"
    statements = (ast.Assign, ast.AnnAssign)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        if not _in_constructor(flow) or not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            return
        kind = flow.kind(node.value)
        if not isinstance(node.value, ast.Call) or not kind & k.TENSOR or kind & (k.GRAPH | k.OUTPUT):
            return
        segment = flow.source.segment(flow.function)
        for name in _self_targets(node):
            if re.search(rf"register_\w+\(\s*[\"']{name}[\"']", segment):
                continue  # the name is a buffer or parameter already
            flow.report(self, node, f"`self.{name}` is a plain tensor: it does not move or save; use register_buffer")


class ModulesInList(AnywhereRule):
    """Finds submodules kept in a plain list, tuple or dict.

    ## Why
    `nn.Module` registers attributes that are modules, not what is inside containers: their parameters neither move
    nor train.

    ## Example
    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    ```

    ## Use instead
    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    ```

    ## When to allow
    To hide a frozen module on purpose; say so.
    """

    code = "ZD502"
    name = "modules-in-list"
    statements = (ast.Assign, ast.AnnAssign)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        if not _in_constructor(flow) or not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            return
        value = node.value
        if isinstance(value, ast.List | ast.Tuple | ast.Set):
            items: list[ast.expr] = value.elts
        elif isinstance(value, ast.Dict):
            items = value.values
        elif isinstance(value, ast.ListComp | ast.SetComp):
            items = [value.elt]
        elif isinstance(value, ast.DictComp):
            items = [value.value]
        else:
            return
        if any(isinstance(item, ast.Call) and flow.kind(item) & k.MODULE for item in items):
            for name in _self_targets(node):
                holder = "ModuleDict" if isinstance(value, ast.Dict | ast.DictComp) else "ModuleList"
                flow.report(self, node, f"`self.{name}` hides its modules; use nn.{holder}")


class KeptGraph(AnywhereRule):
    """Finds a loss added to a running total, or kept in a list, with its graph.

    ## Why
    The total keeps the graph of every step alive: memory grows until it is full.

    ## Example
    ```python
    def train(model, loader, optimizer):
        total = 0.0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer):
        total = 0.0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
    ```

    ## When to allow
    When the sum is what `backward()` is called on.
    """

    code = "ZD503"
    name = "kept-graph"
    scope = Scope.HOT
    statements = (ast.AugAssign,)
    methods = ("append",)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        assert isinstance(node, ast.AugAssign)
        if isinstance(node.op, ast.Add) and self._is_kept(node.target, node.value, flow):
            flow.report(
                self, node, f"`{short(node.target)}` keeps the graph of every step; add `{short(node.value)}.detach()`"
            )

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if owner is not None and len(node.args) == 1 and self._is_kept(owner, node.args[0], flow):
            flow.report(
                self, node, f"`{short(owner)}` keeps the graph of every step; append `{short(node.args[0])}.detach()`"
            )

    @staticmethod
    def _is_kept(target: ast.expr, value: ast.expr, flow: Walk) -> bool:
        kind = flow.kind(value)
        if not kind & k.GRAPH or not k.is_device_value(kind) or flow.no_grad:
            return False
        if flow.owner is not None and flow.owner.has_base("Metric"):
            return False  # torchmetrics updates without gradients
        if isinstance(target, ast.Name):
            backward = f"{target.id}.backward(" in flow.source.text
            return flow.in_step_loop and target.id in flow.cold_names and not backward
        return isinstance(target, ast.Attribute) and flow.is_self(target.value)


class SuperInitLate(AnywhereRule):
    """Finds modules or parameters assigned before `super().__init__()`.

    ## Why
    `nn.Module` has no place to register them yet: it raises.

    ## Example
    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            self.layer = torch.nn.Linear(8, 8)
            super().__init__()
    ```

    ## Use instead
    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
    ```

    ## When to allow
    Never.
    """

    code = "ZD504"
    name = "super-init-late"
    severity = Severity.ERROR

    def check_function(self, function: Function, flow: Walk) -> None:
        if not _in_constructor(flow) or not flow.owner or not flow.owner.has_base("Module", "LightningModule"):
            return
        assert isinstance(function.node, ast.FunctionDef)
        for statement in function.node.body:
            text = ast.unparse(statement) if isinstance(statement, ast.Expr) else ""
            if "super(" in text or "__init__" in text:
                return
            if isinstance(statement, ast.Assign) and flow.kind(statement.value) & k.MODULE:
                for name in _self_targets(statement):
                    flow.report(self, statement, f"`self.{name}` is assigned before `super().__init__()`, which raises")
                    return


class HardCodedDevice(AnywhereRule):
    """Finds `"cuda"` and `.cuda()` in a LightningModule.

    ## Why
    The trainer chooses the device; a fixed one breaks CPU tests, other accelerators and several GPUs.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            noise = torch.randn(16, device="cuda")
            return F.mse_loss(self.layer(batch[0] + noise), batch[1])
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            noise = torch.randn(16, device=self.device)
            return F.mse_loss(self.layer(batch[0] + noise), batch[1])
    ```

    ## When to allow
    In code that is about CUDA itself.
    """

    code = "ZD514"
    name = "hard-coded-device"
    methods = ("cuda", "to")
    keywords = ("device",)
    triggers = (r"\.cuda\(", "cuda[\"':]")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if name == "cuda" and self._in_lightning(flow):
            flow.report(
                self, node, "`.cuda()` fixes the device; the trainer chooses it: use self.device", at_method=True
            )
        elif name == "to" and node.args:
            self.check_keyword(node, node.args[0], flow)

    def check_keyword(self, node: ast.Call, value: ast.expr, flow: Walk) -> None:
        fixed = isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith("cuda")
        if fixed and self._in_lightning(flow):
            flow.report(self, value, f"{short(value)} fixes the device; the trainer chooses it: use self.device")

    @staticmethod
    def _in_lightning(flow: Walk) -> bool:
        return flow.owner is not None and flow.owner.is_lightning


RULES = (
    TensorAttribute,
    ModulesInList,
    KeptGraph,
    SuperInitLate,
    HardCodedDevice,
)
