# ruff: noqa: D102, ARG002 -- what each check sees is documented at Rule
"""ZD505-ZD513: evaluation, loaders and checkpoints."""

import ast

from zdtrain.lint.expressions import Walk
from zdtrain.lint.finding import Severity
from zdtrain.lint.heat import Heat, is_evaluation, is_loader_loop
from zdtrain.lint.infer import is_constant, keyword
from zdtrain.lint.rules.base import AnywhereRule, Rule, Scope, owner_of, short
from zdtrain.lint.source import Function


class _LoaderRule(Rule):
    severity = Severity.NOTE
    scope = Scope.ANYWHERE
    functions = ("torch.utils.data.DataLoader",)

    @staticmethod
    def _open(node: ast.Call) -> bool:
        """Whether keyword arguments come from elsewhere (``**kwargs``)."""
        return any(item.arg is None for item in node.keywords)


class EvaluationWithGrad(AnywhereRule):
    """Finds an evaluation loop that builds graphs: no `no_grad` or `inference_mode` in sight.

    ## Why
    Every batch stores the activations for a backward pass that never comes.

    ## Example
    ```python
    def evaluate(model, loader):
        model.eval()
        total = 0
        for x, y in loader:
            total += F.mse_loss(model(x), y).detach()
        return total
    ```

    ## Use instead
    ```python
    @torch.inference_mode()
    def evaluate(model, loader):
        model.eval()
        total = 0
        for x, y in loader:
            total += F.mse_loss(model(x), y).detach()
        return total
    ```

    ## When to allow
    When the caller has switched gradients off.
    """

    code = "ZD505"
    name = "evaluation-with-grad"
    triggers = (r"\.eval\(\)",)

    def check_function(self, function: Function, flow: Walk) -> None:
        if not is_evaluation(function.name) or flow.no_grad or not flow.calls_module or function.owner is not None:
            return
        segment = flow.source.segment(function)
        quiet = any(word in segment for word in ("no_grad", "inference_mode", "set_grad_enabled", "backward("))
        if not quiet and ".eval()" in segment and any(map(is_loader_loop, function.loops)):
            flow.report(
                self,
                function.node,
                f"`{function.name}` builds a graph per batch; decorate it with @torch.inference_mode()",
            )


class EvalLeftOn(AnywhereRule):
    """Finds `model.eval()` in a training loop that never goes back to `train()`.

    ## Why
    Dropout and batch statistics stay off for the rest of the epoch.

    ## Example
    ```python
    def train(model, loader, optimizer):
        model.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if step % 100 == 0:
                model.eval()
                report(model)
    ```

    ## Use instead
    ```python
    def train(model, loader, optimizer):
        model.train()
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if step % 100 == 0:
                model.eval()
                report(model)
                model.train()
    ```

    ## When to allow
    For a frozen part of the model.
    """

    code = "ZD506"
    name = "eval-left-on"
    methods = ("eval",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        owner = owner_of(node)
        if not isinstance(owner, ast.Name | ast.Attribute):
            return  # a copy, `deepcopy(model).eval()`
        if not flow.in_step_loop or not flow.loops or node.args or flow.place.heat(Heat.COLD) is not Heat.GATED:
            return
        loop = flow.loops[-1]
        text = "\n".join(flow.source.lines[loop.lineno - 1 : loop.end_lineno])
        if ".train(" not in text:
            flow.report(self, node, f"`{short(node)}` is never undone in this loop; call `.train()` afterwards")


class LoaderInProcess(_LoaderRule):
    """Finds a `DataLoader` without worker processes.

    ## Why
    Samples are read and collated between two steps, while the device waits.

    ## Example
    ```python
    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=32, pin_memory=True)
    ```

    ## Use instead
    ```python
    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=32, pin_memory=True, num_workers=4, persistent_workers=True)
    ```

    ## When to allow
    For data in memory that takes no work to collate; workers then cost more than they give.
    """

    code = "ZD507"
    name = "loader-in-process"

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        workers = keyword(node, "num_workers")
        if not self._open(node) and (workers is None or (isinstance(workers, ast.Constant) and workers.value == 0)):
            flow.report(self, node, "samples are collated between steps; set num_workers")


class LoaderUnpinned(_LoaderRule):
    """Finds a `DataLoader` without `pin_memory=True`.

    ## Why
    From pageable memory a copy to the device can't run beside the step, whatever `non_blocking` says.

    ## Example
    ```python
    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=32, num_workers=4, persistent_workers=True)
    ```

    ## Use instead
    ```python
    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=32, num_workers=4, persistent_workers=True, pin_memory=True)
    ```

    ## When to allow
    On the CPU.
    """

    code = "ZD508"
    name = "loader-unpinned"

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        pinned = keyword(node, "pin_memory")
        if not self._open(node) and (pinned is None or is_constant(pinned, False)):
            flow.report(self, node, "batches are in pageable memory; set pin_memory=True")


class LoaderNotPersistent(_LoaderRule):
    """Finds a `DataLoader` whose workers are started again for every epoch.

    ## Why
    Starting them imports everything again; short epochs spend much of their time there.

    ## Example
    ```python
    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=32, num_workers=4, pin_memory=True)
    ```

    ## Use instead
    ```python
    def loader(data):
        return torch.utils.data.DataLoader(data, batch_size=32, num_workers=4, pin_memory=True, persistent_workers=True)
    ```

    ## When to allow
    When the loader is used once.
    """

    code = "ZD509"
    name = "loader-not-persistent"

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        workers = keyword(node, "num_workers")
        some = workers is not None and not (isinstance(workers, ast.Constant) and workers.value == 0)
        if some and not self._open(node) and keyword(node, "persistent_workers") is None:
            flow.report(self, node, "workers start again every epoch; set persistent_workers=True")


class LoadWithoutMapLocation(AnywhereRule):
    """Finds `torch.load` without `map_location`.

    ## Why
    Tensors go back to the device they were saved from: it fails on a machine without that device, and on several
    processes they all land on the first one.

    ## Example
    ```python
    def restore(path):
        return torch.load(path)
    ```

    ## Use instead
    ```python
    def restore(path):
        return torch.load(path, map_location="cpu")
    ```

    ## When to allow
    For files that hold no tensors.
    """

    code = "ZD510"
    name = "load-without-map-location"
    functions = ("torch.load",)
    triggers = (r"load\((?<!json\.load\()(?<!yaml\.load\()(?<!pickle\.load\()(?<!np\.load\()",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        if len(node.args) < 2 and not any(item.arg in ("map_location", None) for item in node.keywords):
            flow.report(self, node, 'tensors go back to the device they were saved from; pass map_location="cpu"')


class LoadRunsCode(AnywhereRule):
    """Finds `torch.load(…, weights_only=False)`.

    ## Why
    Unpickling runs code that the file brings along. Since torch 2.6 the default is safe; this switches it off.

    ## Example
    ```python
    def restore(path):
        return torch.load(path, map_location="cpu", weights_only=False)
    ```

    ## Use instead
    Allow the classes that the file needs.
    ```python
    def restore(path):
        with torch.serialization.safe_globals([Settings]):
            return torch.load(path, map_location="cpu")
    ```

    ## When to allow
    For files that you wrote yourself.
    """

    code = "ZD511"
    name = "load-runs-code"
    functions = ("torch.load",)
    triggers = ("weights_only=False",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        flag = keyword(node, "weights_only")
        if flag is not None and is_constant(flag, False):
            flow.report(self, flag, "`weights_only=False` runs code that the file brings along; use safe_globals")


class DeviceInWorker(AnywhereRule):
    """Finds device tensors made in a dataset or a collate function.

    ## Why
    That code runs in worker processes: CUDA can't be used after a fork, and each worker would take its own context.

    ## Example
    ```python
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return self.items[index].cuda()
    ```

    ## Use instead
    Return host tensors; the trainer copies batches ahead of the step.
    ```python
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return self.items[index]
    ```

    ## When to allow
    With `num_workers=0` and data that already lives on the device.
    """

    code = "ZD512"
    name = "device-in-worker"
    methods = ("cuda", "to")
    triggers = ("def __getitem__", "def collate")

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        function = flow.function
        in_dataset = function.name == "__getitem__" and function.owner is not None and function.owner.is_dataset
        if not in_dataset and not function.name.startswith("collate"):
            return
        target = short(node.args[0]) if node.args else ""
        if name == "cuda" or "cuda" in target or target.endswith("device"):
            flow.report(self, node, "workers must not touch the device; return host tensors")


class SetEpochMissing(AnywhereRule):
    """Finds a `DistributedSampler` whose `set_epoch` is never called.

    ## Why
    Without it every epoch has the same order.

    ## Example
    ```python
    def make(data):
        return torch.utils.data.distributed.DistributedSampler(data)
    ```

    ## Use instead
    ```python
    def make(data, epochs):
        sampler = torch.utils.data.distributed.DistributedSampler(data)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
    ```

    ## When to allow
    With `shuffle=False`, or under a Trainer, which calls it.
    """

    code = "ZD513"
    name = "set-epoch-missing"
    functions = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")
    triggers = (r"DistributedSampler\(",)

    def check_call(self, node: ast.Call, name: str, flow: Walk) -> None:
        uses_trainer = "Trainer(" in flow.source.text or "Lightning" in flow.source.text
        if (
            "set_epoch" not in flow.source.text
            and not uses_trainer
            and not is_constant(keyword(node, "shuffle"), False)
        ):
            flow.report(self, node, "every epoch has the same order; call `sampler.set_epoch(epoch)`")


RULES = (
    EvaluationWithGrad,
    EvalLeftOn,
    LoaderInProcess,
    LoaderUnpinned,
    LoaderNotPersistent,
    LoadWithoutMapLocation,
    LoadRunsCode,
    DeviceInWorker,
    SetEpochMissing,
)
