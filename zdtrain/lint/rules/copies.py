# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD116, ZD117, ZD119, ZD123, ZD124: copies between the host and the device."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Edit, Severity
from zdtrain.lint.infer import is_constant, keyword, names_cpu, names_device
from zdtrain.lint.rules.base import Rule, Scope, owner_of, replaced, short

_CUDA_TYPES = tuple(f"torch.cuda.{name}Tensor" for name in ("Float", "Double", "Half", "Long", "Int", "Bool", "Byte"))


class BlockingCopy(Rule):
    """Finds copies to the device without `non_blocking=True`.

    ## Why
    From pageable memory the host stages the copy itself and waits. From pinned memory
    (`DataLoader(pin_memory=True)`) with `non_blocking=True` it only queues it.

    ## Example
    ```python
    def train(model, loader, optimizer, device):
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer, device):
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            loss = F.mse_loss(model(x), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ```

    ## When to allow
    When the source is rewritten right afterwards: a copy that is still under way would see the new values.
    """

    code = "ZD116"
    name = "blocking-copy"
    severity = Severity.WARNING
    methods = ("to", "cuda", "type", "type_as")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not isinstance(node.func, ast.Attribute):
            return
        owner = flow.kind(node.func.value)
        if owner & (k.MODULE | k.VALUE | k.OPTIMIZER | k.SCHEDULER) or k.is_device_value(owner):
            return
        if keyword(node, "non_blocking") is not None or (name == "to" and not self._to_device(node)):
            return
        if name == "cuda" and owner == k.UNKNOWN and not flow.in_step_loop:
            return
        if name in ("type", "type_as") and not (owner & k.ON_HOST and self._moves(node, flow)):
            return
        if (
            name == "to"
            and owner == k.UNKNOWN
            and any(isinstance(part, ast.Attribute) and part.attr == "dtype" for part in node.args)
        ):
            return
        what = short(node.func.value)
        flow.report(
            self,
            node,
            f"`{what}.{name}(…)` blocks the host; pin the memory and pass non_blocking=True",
            at_method=True,
        )

    @staticmethod
    def _to_device(node: ast.Call) -> bool:
        device = keyword(node, "device")
        arguments = [*node.args[:1], *([device] if device is not None else [])]
        return any(names_device(argument) and not names_cpu(argument) for argument in arguments)

    @staticmethod
    def _moves(node: ast.Call, flow: Walk) -> bool:
        """``.type(Tensor)`` with a name that is not a dtype, and ``.type_as(device tensor)``."""
        if not node.args:
            return False
        argument = node.args[0]
        return k.is_device_tensor(flow.kind(argument)) or (
            isinstance(argument, ast.Name) and argument.id.endswith("Tensor")
        )


class UnsafeHostCopy(Rule):
    """Finds `.to("cpu", non_blocking=True)`: the values are read before they have arrived.

    ## Why
    A non-blocking copy to the host returns at once. Without an event to wait for, Python sees whatever was in that
    memory.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.last = loss.detach().to("cpu", non_blocking=True)
            return loss
    ```

    ## Use instead
    Log the tensor; the drain copies to pinned memory and waits for its own event.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("last", loss)
            return loss
    ```

    ## When to allow
    When an event recorded after the copy is waited for before the first read.
    """

    code = "ZD117"
    name = "unsafe-host-copy"
    severity = Severity.WARNING
    scope = Scope.ANYWHERE
    methods = ("to", "cpu")
    triggers = ("non_blocking=True",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not is_constant(keyword(node, "non_blocking"), True):
            return
        device = keyword(node, "device")
        arguments = [*node.args[:1], *([device] if device is not None else [])]
        if name == "cpu" or any(names_cpu(argument) for argument in arguments):
            flow.report(
                self, node, "a non-blocking copy to the host has to be waited for (record an event) before it is read"
            )


class NumberToDevice(Rule):
    """Finds `torch.tensor(number, device=…)` in a step: a copy from pageable memory each time.

    ## Why
    The number is written to host memory and copied; the host waits for the copy, and a capture refuses it.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            margin = torch.tensor(self.hparams.margin, device=self.device)
            return F.relu(self.layer(batch[0]) - margin).mean()
    ```

    ## Use instead
    A buffer or a device scalar made once. A Python number in arithmetic is fine too: it becomes a kernel argument,
    not a copy.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.relu(self.layer(batch[0]) - self.hparams.margin).mean()
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD119"
    name = "number-to-device"
    severity = Severity.WARNING
    scope = Scope.HOT
    functions = ("torch.tensor", "torch.as_tensor", "torch.scalar_tensor", *_CUDA_TYPES)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not node.args:
            return
        value, kind = node.args[0], flow.kind(node.args[0])
        device = keyword(node, "device")
        if name in _CUDA_TYPES:
            copies = bool(kind & k.ARRAY) or isinstance(value, ast.List | ast.Tuple)
        else:
            copies = device is not None and not names_cpu(device) and bool(kind & k.VALUE)
        if copies:
            made = f"`{short(node.func)}({short(value)}…)`"
            flow.report(self, node, f"{made} copies from the host in every step; make it once")


class TensorFromTensors(Rule):
    """Finds `torch.tensor([t1, t2])` of tensors.

    ## Why
    Each element is read back, and the new tensor is copied to the device again; gradients are lost.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            a = F.mse_loss(self.layer(batch[0]), batch[1])
            b = F.l1_loss(self.layer(batch[0]), batch[1])
            return torch.tensor([a, b]).sum()
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            a = F.mse_loss(self.layer(batch[0]), batch[1])
            b = F.l1_loss(self.layer(batch[0]), batch[1])
            return torch.stack([a, b]).sum()
    ```

    ## When to allow
    Never for tensors on the device.
    """

    code = "ZD123"
    name = "tensor-from-tensors"
    functions = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.Tensor", "torch.LongTensor")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not node.args:
            return
        kind = flow.kind(node.args[0])
        if kind & k.TENSORS and not kind & (k.ON_HOST | k.TENSOR | k.VALUE):
            flow.report(self, node, f"`{name}` reads each tensor of `{short(node.args[0])}` back; use torch.stack")


class LoggedNumber(Rule):
    """Finds `self.log(name, number)` in a step.

    ## Why
    Stock Lightning copies the number to the device at every call. zdtrain does not, and a captured step repeats it;
    a number that changes keeps the step eager. If it came from a tensor, it was read back first for nothing.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss.item())
            return loss
    ```

    ## Use instead
    The tensor. `--fix` does this where the argument is `t.item()` or `float(t)`.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss
    ```

    ## When to allow
    A constant that never changes.
    """

    code = "ZD124"
    name = "logged-number"
    severity = Severity.WARNING
    scope = Scope.STEP
    methods = ("log",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        value = node.args[1] if len(node.args) > 1 else keyword(node, "value")
        if owner is None or value is None or not flow.is_self(owner) or not flow.kind(value) & k.VALUE:
            return
        if isinstance(value, ast.Constant):
            return
        flow.report(
            self, value, f"`{short(value)}` is a number: it is copied to the device each time", self._fix(value, flow)
        )

    @staticmethod
    def _fix(value: ast.expr, flow: Walk) -> tuple[Edit, ...]:
        """``t.item()`` and ``float(t)`` become ``t``: Lightning detaches and converts it itself."""
        if not isinstance(value, ast.Call):
            return ()
        if isinstance(value.func, ast.Attribute) and value.func.attr == "item" and not value.args:
            inner: ast.expr = value.func.value
        elif isinstance(value.func, ast.Name) and value.func.id == "float" and len(value.args) == 1:
            inner = value.args[0]
        else:
            return ()
        text = ast.get_source_segment(flow.source.text, inner)
        return replaced(value, text) if text and k.is_device_value(flow.kind(inner)) else ()


RULES = (
    BlockingCopy,
    UnsafeHostCopy,
    NumberToDevice,
    TensorFromTensors,
    LoggedNumber,
)
