# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD110-ZD115, ZD118: waits and reads that do not look like one."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import Rule, owner_of, short


class DeviceSynchronize(Rule):
    """Finds calls that wait for the whole device, a stream or an event.

    ## Why
    `torch.cuda.synchronize()` idles the host until the device is idle too, and then the device until the host has
    caught up.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
    ```

    ## Use instead
    Nothing: kernels on one stream run in order. To order two streams use `wait_stream` or `wait_event`, which do
    not stop the host; to measure time use events and read them later.
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ```

    ## When to allow
    Around a benchmark, before a capture.
    """

    code = "ZD110"
    name = "device-synchronize"
    functions = (
        "torch.cuda.synchronize",
        "torch.accelerator.synchronize",
        "torch.cpu.synchronize",
        "torch.mps.synchronize",
        "torch.xpu.synchronize",
        "torch.npu.synchronize",
        "torch.cuda.current_stream.synchronize",
    )
    methods = ("synchronize",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if isinstance(node.func, ast.Attribute) and "." not in name and flow.dotted(node.func).startswith("torch."):
            return  # seen once already, by its dotted name
        if name == "synchronize" and len(node.args) > 1:
            return
        flow.report(self, node, f"`{short(node.func)}()` makes the host wait for the device")


class BuiltinComparison(Rule):
    """Finds `max`, `min`, `sorted`, `any` and `all` of Python over tensors.

    ## Why
    They compare two at a time and ask for the truth of each comparison: one host read per element.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            return max(F.cross_entropy(scores, batch[1]), F.mse_loss(scores, batch[2]))
    ```

    ## Use instead
    `torch.maximum`, `torch.stack([...]).amax()`, `.any()`, `.all()`.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            return torch.maximum(F.cross_entropy(scores, batch[1]), F.mse_loss(scores, batch[2]))
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD111"
    name = "builtin-comparison"
    functions = ("max", "min", "sorted", "any", "all")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if len(node.args) == 1:
            argument = node.args[0]
            kind = flow.kind(argument)
            whole = isinstance(argument, ast.GeneratorExp | ast.ListComp | ast.List | ast.Tuple)
            found = k.is_device_value(kind) or (whole and kind & k.TENSORS and not kind & k.ON_HOST)
        else:
            found = any(k.is_device_value(flow.kind(argument)) for argument in node.args)
        if found:
            flow.report(self, node, f"Python's `{name}` reads every tensor it compares; use the torch function")


class MathOnTensor(Rule):
    """Finds `math.*` functions called with a tensor.

    ## Why
    `math` works on Python floats, so the tensor is read back first; the result has lost its gradient.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.ok = math.isfinite(loss)
            return loss
    ```

    ## Use instead
    The torch function of the same name; `SimpleAdam(skip_nonfinite=True)` or a `NonFinite` monitor for the case
    shown.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("ok", torch.isfinite(loss).float())
            return loss
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD112"
    name = "math-on-tensor"
    libraries = ("math", "cmath")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if any(k.is_device_value(flow.kind(argument)) for argument in node.args):
            torch_name = f"torch.{name.partition('.')[2]}"
            flow.report(self, node, f"`{name}` reads `{short(node.args[0])}` back; use {torch_name}")


class DataDependentShape(Rule):
    """Finds operations whose result's shape depends on values: `nonzero`, `unique`, `masked_select`, `t[mask]`.

    ## Why
    To allocate the result the host must know how many elements there are, so it waits for the count. A capture
    refuses it.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self.layer(batch[0]), batch[1], reduction="none")
            return losses[batch[1] != 0].mean()
    ```

    ## Use instead
    Keep the shape and mask the values: `torch.where`, a weight of 0, `ignore_index`.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.layer(batch[0]), batch[1], ignore_index=0)
    ```

    ## When to allow
    Outside the step, or in a step that stays eager on purpose.
    """

    code = "ZD113"
    name = "data-dependent-shape"
    methods = ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "bincount")
    functions = (
        "torch.nonzero",
        "torch.masked_select",
        "torch.unique",
        "torch.unique_consecutive",
        "torch.argwhere",
        "torch.bincount",
        "torch.where",
        "torch.repeat_interleave",
    )
    expressions = (ast.Subscript,)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if "." not in name and flow.dotted(node.func).startswith("torch."):
            return
        last = name.rpartition(".")[2]
        if last == "where" and len(node.args) + len(node.keywords) != 1:
            return
        if last == "repeat_interleave":
            counts = node.args[1] if len(node.args) > 1 else keyword(node, "repeats")
            if counts is None or keyword(node, "output_size") or not k.is_device_tensor(flow.kind(counts)):
                return
        subject = node.args[0] if "." in name and node.args else owner_of(node)
        kind = flow.kind(subject) if subject is not None else k.UNKNOWN
        if kind & (k.ON_HOST | k.VALUE) or (last in ("unique", "nonzero") and "." not in name and not kind & k.TENSOR):
            return
        flow.report(
            self, node, f"the shape of `{last}`'s result is a host read; mask values, keep the shape", at_method=True
        )

    def check_expression(self, node: ast.expr, flow: Walk) -> None:
        if (
            not isinstance(node, ast.Subscript)
            or isinstance(node.ctx, ast.Store)
            or not k.is_device_tensor(flow.kind(node.value))
        ):
            return
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(flow.kind(index) & k.MASK and k.is_device_value(flow.kind(index)) for index in indices):
            flow.report(self, node, f"indexing with a mask (`{short(node)}`) reads how many are true; use torch.where")


class TensorEquality(Rule):
    """Finds comparisons that return a Python bool: `torch.equal`, `torch.allclose`, `is_nonzero`, `x in tensor`.

    ## Why
    A Python bool is a value on the host: the device has to be waited for.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            self.same = torch.allclose(x, batch[1])
            return F.mse_loss(x, batch[1])
    ```

    ## Use instead
    `(a == b).all()` or `torch.isclose(a, b).all()`: a 0-D tensor that stays where it is.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            self.log("same", torch.isclose(x, batch[1]).all().float())
            return F.mse_loss(x, batch[1])
    ```

    ## When to allow
    In tests.
    """

    code = "ZD114"
    name = "tensor-equality"
    methods = ("equal", "allclose", "is_nonzero")
    functions = ("torch.equal", "torch.allclose", "torch.is_nonzero")
    expressions = (ast.Compare,)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if "." not in name:
            owner = owner_of(node)
            if owner is None or not k.is_device_tensor(flow.kind(owner)):
                return
        flow.report(self, node, f"`{name}` returns a Python bool, which is a host read; use `(a == b).all()`")

    def check_expression(self, node: ast.expr, flow: Walk) -> None:
        assert isinstance(node, ast.Compare)
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return  # a key of a dict
        container = flow.kind(node.comparators[-1])
        if isinstance(node.ops[-1], ast.In | ast.NotIn) and k.is_device_value(container):
            flow.report(self, node, f"`in {short(node.comparators[-1])}` reads the tensor; use `(t == x).any()`")


class ErrorIfNonfinite(Rule):
    """Finds `clip_grad_norm_(…, error_if_nonfinite=True)`.

    ## Why
    To raise in Python the norm has to be read, in every step.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
    ```

    ## Use instead
    Skip the bad update on the device: `SimpleAdam(max_norm=1.0, skip_nonfinite=True)`, and let a `NonFinite`
    monitor tell.
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    ```

    ## When to allow
    While looking for the first bad step.
    """

    code = "ZD115"
    name = "error-if-nonfinite"
    keywords = ("error_if_nonfinite",)

    def check_keyword(self, node: ast.Call, value: ast.expr, flow: Walk) -> None:
        if is_constant(value, True):
            flow.report(self, value, "`error_if_nonfinite=True` reads the gradient norm in every step")


class TensorAsIndex(Rule):
    """Finds a tensor used where Python needs an integer: `range(t)`, `[a, b][t]`.

    ## Why
    Python calls `t.__index__()`, a host read.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            for _ in range(batch[1].max()):
                x = self.layer(x)
            return x.mean()
    ```

    ## Use instead
    A bound that is known on the host: a shape, a setting, or the maximum length with a mask.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            for _ in range(batch[1].shape[0]):
                x = self.layer(x)
            return x.mean()
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD118"
    name = "tensor-as-index"
    functions = ("range",)
    expressions = (ast.Subscript,)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        for argument in node.args:
            if k.is_device_value(flow.kind(argument)):
                flow.report(self, argument, f"`range` reads `{short(argument)}` back; use a bound known on the host")

    def check_expression(self, node: ast.expr, flow: Walk) -> None:
        assert isinstance(node, ast.Subscript)
        is_list = isinstance(node.value, ast.List | ast.Tuple | ast.ListComp)
        if is_list and k.is_device_value(flow.kind(node.slice)):
            index = short(node.slice)
            flow.report(self, node, f"a list index must be an int, so `{index}` is read back; use torch.stack")


RULES = (
    DeviceSynchronize,
    BuiltinComparison,
    MathOnTensor,
    DataDependentShape,
    TensorEquality,
    ErrorIfNonfinite,
    TensorAsIndex,
)
