# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD120-ZD122: modes and calls that make the host wait."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Severity
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import Rule, Scope, owner_of, short


class ScalerStep(Rule):
    """Finds `GradScaler.step`: it reads whether an overflow was found, unless the optimizer is fused.

    ## Why
    `scaler.step(optimizer)` decides in Python whether to call the optimizer: one host read per step and per
    optimizer.

    ## Example
    ```python
    def train(model, loader, optimizer):
        scaler = torch.amp.GradScaler()
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    ```

    ## Use instead
    bfloat16, which needs no scaler, or a fused optimizer, which takes the flag as a tensor.
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    ```

    ## When to allow
    With a fused optimizer: the source does not show which one it is, so this is a note.
    """

    code = "ZD120"
    name = "scaler-step"
    severity = Severity.NOTE
    scope = Scope.HOT
    methods = ("step",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if owner is not None and flow.kind(owner) & k.SCALER:
            flow.report(self, node, f"`{short(owner)}.step` reads its overflow flag unless the optimizer is fused")


class AnomalyMode(Rule):
    """Finds autograd's anomaly detection switched on.

    ## Why
    It tests every gradient for NaN and reads the answer: a host read per backward node, and no capture.

    ## Example
    ```python
    torch.autograd.set_detect_anomaly(True)
    ```

    ## Use instead
    A `NonFinite` monitor for the run; anomaly mode for the one step that was found bad.
    ```python
    torch.autograd.set_detect_anomaly(False)
    ```

    ## When to allow
    While debugging.
    """

    code = "ZD121"
    name = "anomaly-mode"
    severity = Severity.WARNING
    scope = Scope.ANYWHERE
    methods = ("set_detect_anomaly", "detect_anomaly")
    keywords = ("detect_anomaly",)
    triggers = ("detect_anomaly",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if is_constant(keyword(node, "check_nan"), False):
            return  # keeps tracebacks only, reads nothing
        switch = node.args[0] if node.args else None
        if name.endswith("set_detect_anomaly") == is_constant(switch, True):
            self._report(node, flow)

    def check_keyword(self, node: ast.Call, value: ast.expr, flow: Walk) -> None:
        if is_constant(value, True):
            self._report(node, flow)

    def _report(self, node: ast.Call, flow: Walk) -> None:
        flow.report(self, node, "anomaly mode reads every gradient back; use a NonFinite monitor")


class EmptyCache(Rule):
    """Finds `torch.cuda.empty_cache()` in a step.

    ## Why
    It waits for the device and gives memory back that the next step has to ask for again.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            torch.cuda.empty_cache()
    ```

    ## Use instead
    Nothing. Against fragmentation: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or padded batches.
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    ```

    ## When to allow
    Between training and something else that needs the memory.
    """

    code = "ZD122"
    name = "empty-cache"
    functions = (
        "torch.cuda.empty_cache",
        "torch.accelerator.empty_cache",
        "torch.cuda.ipc_collect",
        "torch.xpu.empty_cache",
    )

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flow.report(self, node, f"`{name}` waits for the device and empties the allocator's cache")


RULES = (
    ScalerStep,
    AnomalyMode,
    EmptyCache,
)
