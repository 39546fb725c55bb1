# ruff: noqa: D102 -- what each check sees is documented at Rule
"""ZD108, ZD109: device tensors handed to what prints or writes them."""

import ast

from zdtrain.lint import kinds as k
from zdtrain.lint.expressions import Walk
from zdtrain.lint.rules.base import Rule, short


class PrintedTensor(Rule):
    """Finds a tensor given to `print` or to a logging call.

    ## Why
    Printing a tensor copies it to the host, and for a large one runs several kernels to lay it out.

    ## Example
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            print("loss", loss)
            return loss
    ```

    ## Use instead
    ```python
    class Net(L.LightningModule):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss
    ```

    ## When to allow
    While debugging; take it out before measuring.
    """

    code = "ZD108"
    name = "printed-tensor"
    functions = ("print", "logging.info", "logging.debug", "logging.warning", "pprint.pprint", "rich.print")
    methods = ("info", "debug", "warning", "print")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if name == "debug" and isinstance(node.func, ast.Attribute) and flow.kind(node.func.value) & k.TENSOR:
            return
        for argument in node.args:
            inner = argument.value if isinstance(argument, ast.Starred) else argument
            if k.is_device_tensor(flow.kind(inner)):
                flow.report(
                    self, argument, f"`{name.rpartition('.')[2]}` of `{short(inner)}` reads it back; log the tensor"
                )


class LoggedTensor(Rule):
    """Finds a tensor handed to a writer that turns it into a number at once.

    ## Why
    `SummaryWriter.add_scalar`, `wandb.log`, `mlflow.log_metric` and tqdm's `set_postfix` convert where they are
    called.

    ## Example
    ```python
    def train(model, loader, optimizer, writer):
        for step, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss, step)
    ```

    ## Use instead
    `self.log` in a LightningModule; in a loop of your own, collect tensors and write them under an interval.
    ```python
    def train(model, loader, optimizer, writer):
        for step, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                writer.add_scalar("loss", loss, step)
    ```

    ## When to allow
    Under an interval.
    """

    code = "ZD109"
    name = "logged-tensor"
    methods = (
        "add_scalar",
        "add_scalars",
        "add_histogram",
        "log_metric",
        "log_metrics",
        "set_postfix",
        "set_postfix_str",
    )
    functions = ("wandb.log", "mlflow.log_metric", "mlflow.log_metrics", "trackio.log")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        for argument in [*node.args, *(item.value for item in node.keywords)]:
            kind = flow.kind(argument)
            values = argument.values if isinstance(argument, ast.Dict) else [argument]
            for value in values:
                if k.is_device_value(flow.kind(value)) or (isinstance(argument, ast.Name) and _device_dict(kind)):
                    flow.report(self, value, f"`{name.rpartition('.')[2]}` reads `{short(value)}` back at once")


def _device_dict(kind: int) -> bool:
    return bool(kind & k.TENSORS) and not kind & (k.ON_HOST | k.VALUE)


RULES = (PrintedTensor, LoggedTensor)
