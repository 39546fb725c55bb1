# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD101-ZD107: values of device tensors read back to Python."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.infer import is_constant, keyword, names_cpu
from zdtrain.lint.rules.base import Rule, short


class ItemRead(Rule):
    """Finds `.item()`: Python waits until the device has computed the value.

    ## Why
    Launching work on a GPU is asynchronous. `.item()` empties the queue: the host stops until every kernel before
    it has finished, then starts filling an idle device. A captured step can't contain it at all.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.history.append(loss.item())
            return loss
    ```

    ## Use instead
    Hand over the tensor: `self.log` keeps it on the device, and what has to be text is formed when values have been
    drained.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss
    ```

    ## When to allow
    Under an interval, at the end of an epoch, or in evaluation; there it is reported as a note only.
    """

    code = "ZD101"
    name = "item-read"
    methods = ("item",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if node.args or node.keywords or not isinstance(node.func, ast.Attribute):
            return
        owner = flow.kind(node.func.value)
        if owner & (k.VALUE | k.ON_HOST):
            return
        what = short(node.func.value)
        flow.report(self, node, f"`{what}.item()` makes the host wait for the device; keep the tensor", at_method=True)


class NumberCast(Rule):
    """Finds `float(t)`, `int(t)`, `bool(t)`, `complex(t)` and `round(t)` of a tensor.

    ## Why
    Each is `.item()` in other words: the host waits for the device.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.worst = max(self.worst, float(loss))
            return loss
    ```

    ## Use instead
    Compute with tensors: `torch.maximum`, `.to(dtype)`, `.long()`.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("worst", loss, reduce_fx="max")
            return loss
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD102"
    name = "number-cast"
    functions = ("float", "int", "bool", "complex", "round")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if node.args and k.is_device_tensor(flow.kind(node.args[0])):
            flow.report(self, node, f"`{name}({short(node.args[0])})` reads the tensor back; keep it a tensor")


class CopyToHost(Rule):
    """Finds `.cpu()` and `.to("cpu")`: the host waits until the tensor has arrived.

    ## Why
    A copy to host memory is a host read of the whole tensor.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            self.scores.append(scores.detach().cpu())
            return F.cross_entropy(scores, batch[1])
    ```

    ## Use instead
    Accumulate on the device and copy once per epoch.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            self.accuracy.update(scores, batch[1])
            return F.cross_entropy(scores, batch[1])
    ```

    ## When to allow
    Outside the step, and in a read-back that waits on an event of its own.
    """

    code = "ZD103"
    name = "copy-to-host"
    methods = ("cpu", "to")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not isinstance(node.func, ast.Attribute):
            return
        owner = flow.kind(node.func.value)
        if owner & (k.VALUE | k.MODULE | k.OPTIMIZER) or owner & k.ON_HOST:
            return
        if name == "to":
            device = keyword(node, "device")
            if not any(names_cpu(argument) for argument in [*node.args[:1], *([device] if device else [])]):
                return
        if is_constant(keyword(node, "non_blocking"), True):
            return  # ZD117 looks at these
        what = short(node.func.value)
        flow.report(self, node, f"copying `{what}` to host memory makes the host wait for the device", at_method=True)


class NumpyRead(Rule):
    """Finds tensors that become NumPy arrays: `.numpy()`, `np.asarray(t)`, `np.mean(t)`.

    ## Why
    NumPy works in host memory; the tensor has to be waited for and copied first.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.mean = np.mean(loss)
            return loss
    ```

    ## Use instead
    The torch function of the same name.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("mean", torch.mean(loss))
            return loss
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD104"
    name = "numpy-read"
    methods = ("numpy",)
    libraries = ("numpy",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if name.startswith("numpy."):
            if node.args and k.is_device_tensor(flow.kind(node.args[0])):
                what = short(node.args[0])
                flow.report(self, node, f"`{short(node.func)}` reads `{what}` back; use the torch function")
        elif isinstance(node.func, ast.Attribute) and k.is_device_tensor(flow.kind(node.func.value)):
            what = short(node.func.value)
            flow.report(self, node, f"`{what}.numpy()` makes the host wait for the device", at_method=True)


class ListRead(Rule):
    """Finds `.tolist()` of a tensor.

    ## Why
    Every element becomes a Python number: the host waits, then builds the list.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            self.seen.extend(scores.argmax(dim=1).tolist())
            return F.cross_entropy(scores, batch[1])
    ```

    ## Use instead
    Count on the device.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            scores = self.layer(batch[0])
            self.counts.scatter_add_(0, scores.argmax(dim=1), self.ones)
            return F.cross_entropy(scores, batch[1])
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD105"
    name = "list-read"
    methods = ("tolist",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if isinstance(node.func, ast.Attribute) and k.is_device_tensor(flow.kind(node.func.value)):
            what = short(node.func.value)
            flow.report(self, node, f"`{what}.tolist()` makes the host wait for the device", at_method=True)


class TruthTest(Rule):
    """Finds a tensor where Python asks for true or false: `if`, `while`, `assert`, `not`, `and`, `or`.

    ## Why
    Python calls `bool(t)`, which is a host read; and the branch taken while capturing is the one that replays for
    ever.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            if loss > 10.0:
                loss = loss * 0.1
            return loss
    ```

    ## Use instead
    `torch.where`, `torch.clamp`, or a mask; a monitor for conditions that end training.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            return torch.where(loss > 10.0, loss * 0.1, loss)
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD106"
    name = "truth-test"

    def check_truth(self, node: ast.expr, flow: Walk) -> None:
        if k.is_device_value(flow.kind(node)):
            flow.report(self, node, f"asking whether `{short(node)}` is true reads it back; use torch.where or a mask")


class FormattedTensor(Rule):
    """Finds a tensor turned into text: f-strings, `%`, `.format()`, `str()`, `repr()`.

    ## Why
    The digits are needed, so the host waits for them, even if nobody reads the text.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.status = f"loss {loss:.3f}"
            return loss
    ```

    ## Use instead
    `self.log(..., prog_bar=True)`: the bar shows the last value that has been drained.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss
    ```

    ## When to allow
    In an error message: that code runs once.
    """

    code = "ZD107"
    name = "formatted-tensor"

    def check_format(self, node: ast.expr, flow: Walk) -> None:
        inner = node.value if isinstance(node, ast.Starred) else node
        if k.is_device_tensor(flow.kind(inner)):
            flow.report(self, node, f"formatting `{short(inner)}` reads it back; log the tensor")


RULES = (ItemRead, NumberCast, CopyToHost, NumpyRead, ListRead, TruthTest, FormattedTensor)
