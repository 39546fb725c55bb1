# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD201-ZD205, ZD207: what a capture bakes into the step."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.rules.base import CaptureRule, owner_of, short


class StepCounter(CaptureRule):
    """Finds `batch_idx`, `global_step` and `current_epoch` used inside the step.

    ## Why
    A captured step runs its Python once. Whatever number the counter had then is used in every later step.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            weight = min(1.0, self.global_step / 1000)
            return weight * F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## Use instead
    A device scalar that something outside the step writes in place.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return self.trainer.scalars.weight * F.mse_loss(self.layer(batch[0]), batch[1])

        def on_train_batch_start(self, batch, batch_idx):
            self.trainer.scalars.weight = min(1.0, self.global_step / 1000)
    ```

    ## When to allow
    Where the counter is only compared with constants, as in `if batch_idx % 100 == 0`: such a step has a program for
    each outcome. And in a module that is never captured: zdtrain runs such a step eagerly and says why.
    """

    code = "ZD201"
    name = "step-counter"
    names = ("batch_idx",)
    attributes = ("global_step", "current_epoch")

    def check_name(self, node: ast.Name | ast.Attribute, name: str, flow: Walk) -> None:
        if isinstance(node, ast.Name) or short(node.value) in ("self", "self.trainer", "trainer", "pl_module"):
            flow.report(self, node, f"`{short(node)}` is baked into a captured step; use a device scalar")


class HostRandom(CaptureRule):
    """Finds `random` and `numpy.random` in the step.

    ## Why
    The number is drawn once, while capturing, and used for ever.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            mix = random.random()
            return F.mse_loss(self.layer(batch[0] * mix), batch[1])
    ```

    ## Use instead
    torch's generator on the device: its state advances with every replay.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            mix = torch.rand((), device=self.device)
            return F.mse_loss(self.layer(batch[0] * mix), batch[1])
    ```

    ## When to allow
    In data loading.
    """

    code = "ZD202"
    name = "host-random"
    libraries = ("random", "numpy")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not name.startswith("numpy.") or name.startswith("numpy.random."):
            drawn = f"`{short(node.func)}` is drawn once while capturing"
            flow.report(self, node, f"{drawn}; use a torch function on the device")


class PythonState(CaptureRule):
    """Finds Python state that the step changes: counters, lists, attributes that hold values.

    ## Why
    Replaying a captured step runs no Python: the counter stops, the list stays as it was.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            self.seen += 1
            return F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## Use instead
    A buffer changed in place, or a hook outside the step.
    ```python
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def training_step(self, batch, batch_idx):
            self.seen.add_(1)
            return F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## When to allow
    In a module that is never captured.
    """

    code = "ZD203"
    name = "python-state"
    statements = (ast.AugAssign, ast.Assign)
    methods = ("append", "extend", "appendleft", "insert")

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        value = flow.kind(node.value) if isinstance(node, ast.Assign | ast.AugAssign) else k.UNKNOWN
        for target in targets:
            if not (isinstance(target, ast.Attribute) and flow.is_self(target.value)) or not value & k.VALUE:
                continue
            if isinstance(node, ast.AugAssign) and flow.kind(target) & k.TENSOR:
                continue  # a tensor changed in place
            flow.report(self, target, f"`self.{target.attr}` is not updated by a replayed step; use a buffer in place")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if isinstance(owner, ast.Attribute) and flow.is_self(owner.value) and not flow.kind(owner) & k.MODULE:
            flow.report(self, node, f"`self.{owner.attr}.{name}` does not run when a step is replayed; use self.log")


class TensorRebound(CaptureRule):
    """Finds a tensor attribute that the step replaces instead of writing in place.

    ## Why
    A captured step goes on reading and writing the old tensor. zdtrain puts the new value back into the old address
    where it can (buffers, metric states); in place is cheaper and always right.

    ## Example
    ```python
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(16))

        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            self.center = 0.9 * self.center + 0.1 * x.detach().mean(dim=0)
            return F.mse_loss(x - self.center, batch[1])
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(16))

        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            self.center.lerp_(x.detach().mean(dim=0), 0.1)
            return F.mse_loss(x - self.center, batch[1])
    ```

    ## When to allow
    Outside the step.
    """

    code = "ZD204"
    name = "tensor-rebound"
    statements = (ast.Assign,)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        assert isinstance(node, ast.Assign)
        for target in node.targets:
            if isinstance(target, ast.Attribute) and flow.is_self(target.value) and flow.kind(node.value) & k.TENSOR:
                flow.report(
                    self, target, f"the step replaces `self.{target.attr}`; write it in place (`copy_`, `lerp_`)"
                )


class WallClock(CaptureRule):
    """Finds clocks read inside the step.

    ## Why
    The time is that of the capture; and without a wait it measures how long launching took, not the work.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            start = time.perf_counter()
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("seconds", time.perf_counter() - start)
            return loss
    ```

    ## Use instead
    The profiler, or a clock in a hook outside the step.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def on_train_batch_start(self, batch, batch_idx):
            self.start = time.perf_counter()
    ```

    ## When to allow
    Never inside a captured step.
    """

    code = "ZD205"
    name = "wall-clock"
    functions = (
        "time.time",
        "time.perf_counter",
        "time.monotonic",
        "time.process_time",
        "time.time_ns",
        "time.perf_counter_ns",
        "datetime.datetime.now",
        "datetime.now",
    )

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flow.report(self, node, f"`{name}` is read once while capturing; take times in a hook outside the step")


class GlobalState(CaptureRule):
    """Finds `global` in code that the step runs.

    ## Why
    A module-level variable changed by the step changes once, while capturing.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            global steps
            steps = steps + 1
            return F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.steps = self.steps + 1
    ```

    ## When to allow
    In a module that is never captured.
    """

    code = "ZD207"
    name = "global-state"
    statements = (ast.Global,)

    def check_statement(self, node: ast.stmt, flow: Walk) -> None:
        flow.report(self, node, "a global changed by the step is not changed by a replay; move it to a hook outside")


RULES = (
    StepCounter,
    HostRandom,
    PythonState,
    TensorRebound,
    WallClock,
    GlobalState,
)
