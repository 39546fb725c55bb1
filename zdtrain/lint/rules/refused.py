# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD206, ZD208-ZD212: what a capture refuses, or runs once only."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import CaptureRule, owner_of, short


class InputOutput(CaptureRule):
    """Finds files written or read inside the step.

    ## Why
    A replay does not run it, and writing a tensor waits for it.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            torch.save(batch, "last_batch.pt")
            return loss
    ```

    ## Use instead
    A callback under an interval.
    ```python
    class SaveBatch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx % 1000 == 0:
                torch.save(batch, "last_batch.pt")
    ```

    ## When to allow
    While debugging.
    """

    code = "ZD206"
    name = "input-output"
    functions = ("torch.save", "torch.load", "open", "input", "os.makedirs", "pickle.dump", "json.dump", "numpy.save",
                 "torchvision.utils.save_image", "breakpoint", "pdb.set_trace")  # fmt: skip

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flow.report(self, node, f"`{name}` does not run when a step is replayed; move it to a callback")


class CaptureBranch(CaptureRule):
    """Finds code that asks whether a capture is under way.

    ## Why
    It makes the captured step compute something else than the eager one, so nothing that was tested eagerly holds.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = self.layer(batch[0])
            if not torch.cuda.is_current_stream_capturing():
                x = x.clamp(-1, 1)
            return F.mse_loss(x, batch[1])
    ```

    ## Use instead
    The same computation both ways.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.layer(batch[0]).clamp(-1, 1), batch[1])
    ```

    ## When to allow
    To skip a check that has no effect on values.
    """

    code = "ZD208"
    name = "capture-branch"
    functions = ("torch.cuda.is_current_stream_capturing", "torch.compiler.is_compiling", "torch._dynamo.is_compiling")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flow.report(self, node, f"`{name}` lets the captured step differ from the eager one")


class SeedInStep(CaptureRule):
    """Finds seeds and generator states set or read inside the step.

    ## Why
    `manual_seed`, `get_rng_state` and `set_rng_state` are host operations: refused during a capture, or done once.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            torch.manual_seed(0)
            return F.mse_loss(F.dropout(self.layer(batch[0])), batch[1])
    ```

    ## Use instead
    Seed before training. A replay advances the device generator as the eager step does.
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(F.dropout(self.layer(batch[0])), batch[1])
    ```

    ## When to allow
    In a step that stays eager.
    """

    code = "ZD209"
    name = "seed-in-step"
    functions = (
        "torch.manual_seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "torch.get_rng_state",
        "torch.set_rng_state",
        "torch.cuda.get_rng_state",
        "torch.cuda.set_rng_state",
        "torch.Generator",
        "random.seed",
        "numpy.random.seed",
        "lightning.seed_everything",
        "lightning.pytorch.seed_everything",
    )

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flow.report(self, node, f"`{name}` in the step is refused or frozen by a capture; seed before training")


class CheckpointRng(CaptureRule):
    """Finds activation checkpointing that saves and restores the generator's state.

    ## Why
    `preserve_rng_state=True`, the default, reads the generator's state to the host; the reentrant variant also runs
    its own backward inside. A CUDA graph capture refuses the first.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = torch.utils.checkpoint.checkpoint(self.layer, batch[0], use_reentrant=False)
            return F.mse_loss(x, batch[1])
    ```

    ## Use instead
    Where the checkpointed part has no dropout:
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            x = torch.utils.checkpoint.checkpoint(self.layer, batch[0], use_reentrant=False, preserve_rng_state=False)
            return F.mse_loss(x, batch[1])
    ```

    ## When to allow
    With dropout inside, in a step that stays eager.
    """

    code = "ZD210"
    name = "checkpoint-rng"
    functions = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if not is_constant(keyword(node, "preserve_rng_state"), False):
            flow.report(
                self, node, "checkpoint saves the generator's state, which a capture refuses: preserve_rng_state=False"
            )


class ModeFlip(CaptureRule):
    """Finds `train()`, `eval()` and `requires_grad_()` on modules inside the step.

    ## Why
    The mode is read in Python while capturing; a replay keeps the one it saw. zdtrain keys its programs by mode, so
    a flip in the step makes it capture again or fall back.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            self.teacher.eval()
            return F.mse_loss(self.layer(batch[0]), self.teacher(batch[0]))
    ```

    ## Use instead
    Set modes once, outside.
    ```python
    class Net(L.LightningModule):
        def on_train_epoch_start(self):
            self.teacher.eval()

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.layer(batch[0]), self.teacher(batch[0]))
    ```

    ## When to allow
    In a step that stays eager.
    """

    code = "ZD211"
    name = "mode-flip"
    methods = ("train", "eval", "requires_grad_")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if owner is not None and (flow.kind(owner) & k.MODULE or flow.is_self(owner)):
            flow.report(self, node, f"`{short(owner)}.{name}()` in the step is frozen by a capture; set it outside")


class StreamInStep(CaptureRule):
    """Finds streams, events and pinned memory made inside the step.

    ## Why
    They are made once while capturing, on whatever stream that was; pinned allocations are refused.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            side = torch.cuda.Stream()
            return F.mse_loss(self.layer(batch[0]), batch[1])
    ```

    ## Use instead
    A monitor or a callback outside the step; zdtrain orders its own streams.
    ```python
    class Net(L.LightningModule):
        def on_fit_start(self):
            self.side = torch.cuda.Stream()
    ```

    ## When to allow
    In a step that stays eager.
    """

    code = "ZD212"
    name = "stream-in-step"
    functions = ("torch.cuda.Stream", "torch.cuda.Event", "torch.Stream", "torch.Event")
    methods = ("pin_memory",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flow.report(self, node, f"`{name}` in the step runs once while capturing, or is refused; make it outside")


RULES = (
    InputOutput,
    CaptureBranch,
    SeedInStep,
    CheckpointRng,
    ModeFlip,
    StreamInStep,
)
