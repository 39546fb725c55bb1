# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD401-ZD407: 0-D tensors and constants used wrongly."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Edit, Severity
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import Rule, Scope, owner_of, replaced, short


class HostConstant(Rule):
    """Finds a tensor made in the step without `device=`: it lives in host memory.

    ## Why
    Mixing it with device tensors fails, or copies it over in every step.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            noise = torch.randn(32, 16)
            return F.mse_loss(self.layer(batch[0] + noise), batch[1])
    ```

    ## Use instead
    `device=`, `torch.randn_like`, or a buffer made once.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            noise = torch.randn_like(batch[0])
            return F.mse_loss(self.layer(batch[0] + noise), batch[1])
    ```

    ## When to allow
    A 0-D constant used once in arithmetic works, but a device scalar says what is meant.
    """

    code = "ZD401"
    name = "host-constant"
    severity = Severity.WARNING
    scope = Scope.STEP
    functions = tuple(f"torch.{name}" for name in sorted(k.COMMON_FACTORIES))

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if any(item.arg in ("device", "out", None) for item in node.keywords):
            return
        if flow.applied(node) in ("to", "cuda", "type_as"):
            return  # ZD116 says what to do about the copy
        if node.args and flow.kind(node.args[0]) & k.TENSORS:
            return  # ZD123
        flow.report(self, node, f"`{name}` without device= makes the tensor in host memory")


class IntegerScalar(Rule):
    """Finds `torch.tensor(1)` in a step: an int64 where a float is usually meant.

    ## Why
    The dtype follows the literal: `torch.tensor(1)` is int64, `torch.tensor(1.0)` is float32. In-place arithmetic
    with floats then fails or rounds.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scale = torch.tensor(2, device=self.device)
            return scale * F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## Use instead
    An explicit dtype, once.
    ```python
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float32))

        def training_step(self, batch, batch_idx):
            return self.scale * F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## When to allow
    With `dtype=torch.int64` written out.
    """

    code = "ZD402"
    name = "integer-scalar"
    severity = Severity.WARNING
    scope = Scope.HOT
    functions = ("torch.tensor",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not node.args or keyword(node, "dtype") is not None:
            return
        value = node.args[0]
        if isinstance(value, ast.Constant) and type(value.value) is int:
            flow.report(self, node, f"`torch.tensor({value.value})` is int64; give the dtype, or write {value.value}.0")


class CatOfScalars(Rule):
    """Finds `torch.cat` of 0-D tensors.

    ## Why
    `torch.cat` joins along a dimension, and a 0-D tensor has none: it raises.

    ## Example
    ```python
    def total(a, b):
        first = F.mse_loss(a, b)
        second = F.l1_loss(a, b)
        return torch.cat([first, second]).sum()
    ```

    ## Use instead
    `torch.stack`; `--fix` replaces it.
    ```python
    def total(a, b):
        first = F.mse_loss(a, b)
        second = F.l1_loss(a, b)
        return torch.stack([first, second]).sum()
    ```

    ## When to allow
    Never.
    """

    code = "ZD403"
    name = "cat-of-scalars"
    scope = Scope.ANYWHERE
    functions = ("torch.cat", "torch.concat", "torch.concatenate")
    triggers = (r"torch\.cat\(", r"torch\.concat")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not node.args or not isinstance(node.args[0], ast.List | ast.Tuple) or not node.args[0].elts:
            return
        if all(flow.kind(item) & k.SCALAR for item in node.args[0].elts):
            fix: tuple[Edit, ...] = ()
            if isinstance(node.func, ast.Attribute):
                end_line, end = node.func.end_lineno or node.lineno, node.func.end_col_offset or 0
                fix = (Edit(end_line, end - len(node.func.attr), end_line, end, "stack"),)
            flow.report(self, node, f"`{name}` can't join 0-D tensors; use torch.stack", fix)


class NumberAsMask(Rule):
    """Finds `torch.tensor(1)` or `torch.tensor(0)` used as a mask.

    ## Why
    A mask has to be boolean: `torch.where` and `masked_fill` refuse integers, and indexing with one picks row 1.

    ## Example
    ```python
    def pick(a, b):
        return torch.where(torch.tensor(1), a, b)
    ```

    ## Use instead
    `--fix` writes the boolean.
    ```python
    def pick(a, b):
        return torch.where(torch.tensor(True), a, b)
    ```

    ## When to allow
    Never.
    """

    code = "ZD404"
    name = "number-as-mask"
    scope = Scope.ANYWHERE
    functions = ("torch.where", "torch.masked_fill", "torch.masked_select")
    methods = ("masked_fill", "masked_fill_", "masked_select")
    triggers = (r"torch\.tensor\([01]",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        at = 1 if name in ("torch.masked_fill", "torch.masked_select") else 0
        if len(node.args) <= at:
            return
        mask = node.args[at]
        if not (isinstance(mask, ast.Call) and flow.dotted(mask.func) == "torch.tensor" and len(mask.args) == 1):
            return
        value = mask.args[0]
        if isinstance(value, ast.Constant) and type(value.value) is int and keyword(mask, "dtype") is None:
            flow.report(self, mask, "a mask must be boolean", replaced(value, str(bool(value.value))))


class IntermediateGrad(Rule):
    """Finds `.grad` of a tensor that is not a leaf, without `retain_grad()`.

    ## Why
    Autograd keeps gradients of leaves only; of everything else `.grad` is None.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            hidden = model(x)
            loss = F.mse_loss(hidden, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(loss.grad)
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            hidden = model(x)
            loss = F.mse_loss(hidden, y)
            loss.retain_grad()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(loss.grad)
    ```

    ## When to allow
    Never.
    """

    code = "ZD405"
    name = "intermediate-grad"
    severity = Severity.WARNING
    scope = Scope.HOT
    attributes = ("grad",)

    def check_name(self, node: ast.Name | ast.Attribute, name: str, flow: Walk) -> None:
        owner = getattr(node, "value", None)
        if not isinstance(owner, ast.Name):
            return
        kind = flow.kind(owner)
        if kind & k.GRAPH and kind & k.TENSOR and f"{owner.id}.retain_grad(" not in flow.source.segment(flow.function):
            flow.report(self, node, f"`{owner.id}.grad` is None: call `{owner.id}.retain_grad()` before backward")


class ParameterMoved(Rule):
    """Finds `nn.Parameter(…).to(…)` and `torch.tensor(…, requires_grad=True).cuda()`: no longer a leaf.

    ## Why
    The copy is the result of an operation, so its `.grad` stays None and an optimizer refuses it.

    ## Example
    ```python
    def make(device):
        return torch.zeros(3, requires_grad=True).to(device)
    ```

    ## Use instead
    Make it where it belongs.
    ```python
    def make(device):
        return torch.zeros(3, device=device, requires_grad=True)
    ```

    ## When to allow
    When only the original is used afterwards.
    """

    code = "ZD406"
    name = "parameter-moved"
    scope = Scope.ANYWHERE
    methods = ("to", "cuda", "cpu", "half", "float", "double")
    triggers = (r"Parameter\(", "requires_grad=True")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        made = owner_of(node)
        if not isinstance(made, ast.Call):
            return
        is_parameter = flow.dotted(made.func) in ("torch.nn.Parameter", "torch.nn.parameter.Parameter")
        if is_parameter or (is_constant(keyword(made, "requires_grad"), True) and flow.kind(made) & k.TENSOR):
            flow.report(self, node, f"`.{name}(…)` makes a copy that is not a leaf; make it with device= and dtype=")


class UnreducedLoss(Rule):
    """Finds `backward()` of a loss asked for with `reduction="none"`.

    ## Why
    Only a 0-D tensor has one gradient; torch raises at run time.

    ## Example
    ```python
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y, reduction="none")
        loss.backward()
    ```

    ## Use instead
    ```python
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y, reduction="none")
        loss.mean().backward()
    ```

    ## When to allow
    With a gradient given: `loss.backward(weights)`.
    """

    code = "ZD407"
    name = "unreduced-loss"
    scope = Scope.ANYWHERE
    methods = ("backward",)
    triggers = ("reduction=[\"']none",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if owner is not None and not node.args and flow.kind(owner) & k.UNREDUCED:
            flow.report(self, node, f"`{short(owner)}` is not 0-D; reduce it first, for example `.mean()`")


RULES = (
    HostConstant,
    IntegerScalar,
    CatOfScalars,
    NumberAsMask,
    IntermediateGrad,
    ParameterMoved,
    UnreducedLoss,
)
