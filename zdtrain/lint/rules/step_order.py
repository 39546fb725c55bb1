# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD302-ZD306, ZD310: the order of a training step."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Severity
from zdtrain.lint.rules.base import Rule, Scope, StatementCall, owner_of, short


def _is_optimizer(receiver: str) -> bool:
    return "opt" in receiver.lower() and "sched" not in receiver.lower()


class _OrderRule(Rule):
    severity = Severity.ERROR
    scope = Scope.ANYWHERE
    triggers = (r"\.step\(",)


class GradientsWiped(_OrderRule):
    """Finds `zero_grad()` between `backward()` and `step()` of the same optimizer.

    ## Why
    The gradients that were just computed are deleted; the optimizer steps with nothing.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## When to allow
    Never.
    """

    code = "ZD302"
    name = "gradients-wiped"

    def check_calls(self, calls: list[StatementCall], flow: Walk) -> None:
        fresh = False
        wiped: dict[str, ast.Call] = {}
        for receiver, method, call in calls:
            if method in ("backward", "manual_backward"):
                fresh, wiped = True, {}
            elif method == "zero_grad" and fresh and _is_optimizer(receiver):
                wiped[receiver] = call
            elif method == "step":
                if receiver in wiped:
                    flow.report(
                        self,
                        wiped[receiver],
                        f"`{receiver}.zero_grad()` deletes the gradients before `{receiver}.step()`",
                    )
                fresh = fresh and not _is_optimizer(receiver)


class MissingZeroGrad(_OrderRule):
    """Finds a training loop that never zeroes gradients.

    ## Why
    Gradients add up over all steps.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
    ```

    ## When to allow
    When something else in the loop does it, an engine for example.
    """

    code = "ZD303"
    name = "missing-zero-grad"
    severity = Severity.WARNING

    def check_calls(self, calls: list[StatementCall], flow: Walk) -> None:
        if not flow.in_step_loop or "zero_grad" in flow.source.text or ".grad = None" in flow.source.text:
            return
        if not any(method == "backward" for _, method, _ in calls):
            return
        for receiver, method, call in calls:
            if method == "step" and _is_optimizer(receiver) and not call.args:
                flow.report(self, call, f"nothing zeroes the gradients before the next `{receiver}.step()`")


class SchedulerFirst(_OrderRule):
    """Finds `scheduler.step()` before `optimizer.step()`.

    ## Why
    The first value of the schedule is skipped; torch warns at run time.

    ## Example
    ```python
    def train(model, loader, optimizer, scheduler):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            scheduler.step()
            optimizer.step()
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer, scheduler):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    ```

    ## When to allow
    When the scheduler belongs to another optimizer.
    """

    code = "ZD304"
    name = "scheduler-first"
    severity = Severity.WARNING

    def check_calls(self, calls: list[StatementCall], flow: Walk) -> None:
        first: ast.Call | None = None
        for receiver, method, call in calls:
            if method != "step":
                continue
            if "sched" in receiver.lower():
                first = first or call
            elif _is_optimizer(receiver):
                if first is not None:
                    flow.report(
                        self, first, f"step the scheduler after `{receiver}.step()`; its first value is skipped"
                    )
                return


class ClipOrder(_OrderRule):
    """Finds gradient clipping that comes after the step or before the backward pass.

    ## Why
    It clips nothing: the gradients have been used already, or are not there yet.

    ## Example
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    ```

    ## When to allow
    Never.
    """

    code = "ZD305"
    name = "clip-order"

    def check_calls(self, calls: list[StatementCall], flow: Walk) -> None:
        methods = [method for _, method, _ in calls]
        steps = [at for at, (receiver, method, _) in enumerate(calls) if method == "step" and _is_optimizer(receiver)]
        backwards = [at for at, method in enumerate(methods) if method in ("backward", "manual_backward")]
        if not steps or not backwards:
            return
        for at, (_, method, call) in enumerate(calls):
            if not method.startswith("clip_grad_"):
                continue
            if at < backwards[0] < steps[-1]:
                flow.report(self, call, "clipping before `backward()` clips nothing; put it between backward and step")
            elif any(step < at for step in steps) and not any(
                max(s for s in steps if s < at) < b < at for b in backwards
            ):
                flow.report(self, call, "clipping after `step()` clips nothing; put it between backward and step")


class ClipScaled(_OrderRule):
    """Finds gradients clipped while they are still multiplied by the loss scale.

    ## Why
    The norm is thousands of times too large, so every gradient is clipped to almost nothing.

    ## Example
    ```python
    def train(model, loader, optimizer, scaler):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer, scaler):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    ```

    ## When to allow
    Never.
    """

    code = "ZD306"
    name = "clip-scaled"

    def check_calls(self, calls: list[StatementCall], flow: Walk) -> None:
        clips = [call for _, method, call in calls if method.startswith("clip_grad_")]
        if not clips:
            return
        scaled = any(".scale(" in receiver and method == "backward" for receiver, method, _ in calls)
        if scaled and "unscale_" not in flow.source.segment(flow.function):
            flow.report(self, clips[0], "unscale the gradients first: `scaler.unscale_(optimizer)`")


class ScalerNotUpdated(_OrderRule):
    """Finds `scaler.step(optimizer)` without `scaler.update()`.

    ## Why
    The scale never adapts: after an overflow it stays too large and every later step is skipped.

    ## Example
    ```python
    def train(model, loader, optimizer, scaler):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer, scaler):
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    ```

    ## When to allow
    When another function of the same loop updates it.
    """

    code = "ZD310"
    name = "scaler-not-updated"
    severity = Severity.WARNING
    methods = ("step",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if owner is None or not node.args:
            return
        text = short(owner, 200)
        is_scaler = flow.kind(owner) & k.SCALER or text.lower().endswith("scaler")
        if is_scaler and f"{text}.update(" not in flow.source.text:
            flow.report(self, node, f"`{text}.update()` is missing; the loss scale never adapts")


RULES = (
    GradientsWiped,
    MissingZeroGrad,
    SchedulerFirst,
    ClipOrder,
    ClipScaled,
    ScalerNotUpdated,
)
