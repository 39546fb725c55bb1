"""What is a tensor and what is not: Python numbers, NumPy, settings and host tensors are not flagged."""

import textwrap

import pytest

from zdtrain.lint.linter import lint_source

STEP = """\
import math
import numpy as np
import torch
import torch.nn.functional as F
import lightning as L

class Net(L.LightningModule):
    def __init__(self, cfg, width: int):
        super().__init__()
        self.width = width
        self.alpha = 0.5
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.layer(x)
        loss = F.cross_entropy(out, y)
{body}
        return loss
"""


def codes(body: str) -> list[str]:
    source = STEP.format(body=textwrap.indent(textwrap.dedent(body).strip(), " " * 8))
    return [finding.code for finding in lint_source(source) if finding.code.startswith("ZD1")]


@pytest.mark.parametrize(
    "body",
    [
        "n = int(x.shape[0] / 2)",
        "n = float(len(y))",
        "n = int(x.size(0))",
        "if x.dim() > 3: out = out.mean(-1)",
        "if x.requires_grad and x.is_cuda: out = out * 1",
        "if self.width > 3: out = out * 2",
        "if self.alpha: out = out * self.alpha",
        "scale = math.sqrt(self.width)",
        "scale = math.log(x.shape[-1])",
        "text = f'{x.shape} {self.width} {loss.dtype}'",
        "k = max(1, self.width)",
        "k = min(x.shape)",
        "if y is None: out = out * 2",
        "if isinstance(batch, dict): out = out * 2",
        "if 'mask' in batch: out = out * 2",
        "if self.training: out = out * 2",
        "a = np.arange(4); b = float(a.sum()); c = a.tolist()",
        "for i in range(x.shape[0]): out = out + i",
        "weights = [0.1, 0.2]; total = sum(weights); t = bool(total)",
        "z = torch.where(loss > 1, loss, loss * 2)",
        "mask = y != 0; z = out * mask.unsqueeze(-1)",
        "numbers = self.hparams.width; n = int(numbers)",
        "assert x.ndim == 2, f'{x.ndim}'",
        "if loss.numel() == 1: out = out * 2",
        "z = out[:, 0]; w = out[..., None]; v = out[torch.argmax(out, dim=1)]",
        "self.log('loss', loss)",
        "lr = self.trainer.optimizers[0].param_groups[0]['lr']; n = float(lr)",
        "z = loss.to(torch.float64)",
        "z = out.view(-1).max(dim=0)",
        "for i, (name, p) in enumerate(self.named_parameters()):\n    if name: print(name)",
        "for a, (name, b) in zip(batch, self.named_buffers()):\n    if name: print(f'{name}')",
        "for a, (i, (b, name)) in zip(batch, enumerate(zip(batch, ['x', 'y']))):\n    if i or name: print(name)",
        "if torch.autograd._profiler_enabled(): out = out * 2",
        "if torch._C._autograd._profiler_enabled() and not torch.are_deterministic_algorithms_enabled(): out = out * 2",
    ],
)
def test_host_values_are_not_flagged(body: str) -> None:
    assert codes(body) == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("n = float(loss)", "ZD102"),
        ("n = int(y.max())", "ZD102"),
        ("n = bool((out > 0).all())", "ZD102"),
        ("if (out > 0).any(): loss = loss * 2", "ZD106"),
        ("if torch.isnan(loss): return None", "ZD106"),
        ("while loss > 1: loss = loss / 2", "ZD106"),
        ("z = 1 if loss > 1 else 2", "ZD106"),
        ("assert loss > 0", "ZD106"),
        ("ok = not loss.isfinite()", "ZD106"),
        ("if self.width and loss > 1: loss = loss * 2", "ZD106"),
        ("if 0 < loss < 1: loss = loss * 2", "ZD106"),
        ("z = [i for i in range(3) if loss > i]", "ZD106"),
        ("text = f'{loss:.3f}'", "ZD107"),
        ("text = '%.3f' % loss", "ZD107"),
        ("text = '{:.3f}'.format(loss)", "ZD107"),
        ("text = str(self.table)", "ZD107"),
        ("print(out)", "ZD108"),
        ("k = max(loss, loss * 2)", "ZD111"),
        ("k = max(t.norm() for t in self.layer.parameters())", "ZD111"),
        ("z = math.exp(loss)", "ZD112"),
        ("z = out[y > 0]", "ZD113"),
        ("z = torch.unique(y)", "ZD113"),
        ("z = (y > 0).nonzero()", "ZD113"),
        ("z = torch.where(y > 0)", "ZD113"),
        ("z = y.detach().cpu()", "ZD103"),
        ("z = y.to('cpu')", "ZD103"),
        ("z = y.to(device='cpu')", "ZD103"),
        ("z = y.tolist()", "ZD105"),
        ("z = np.mean(out)", "ZD104"),
        ("z = out.detach().numpy()", "ZD104"),
        ("z = torch.equal(out, x)", "ZD114"),
        ("torch.cuda.current_stream().synchronize()", "ZD110"),
        ("for i in range(y.max()): out = out + i", "ZD118"),
        ("z = loss.mean().item()", "ZD101"),
        ("z = (out\n     .sum()\n     .item())", "ZD101"),
        ("for i, (name, p) in enumerate(self.named_parameters()):\n    if p: print(name)", "ZD106"),
        ("for a, (i, (b, name)) in zip(x, enumerate(zip(x, ['x', 'y']))):\n    if b: print(name)", "ZD106"),
        ("z = torch.tensor([loss, loss])", "ZD123"),
        ("z = torch.tensor(self.width, device=self.device)", "ZD119"),
    ],
)
def test_reads_of_device_tensors_are_found(body: str, code: str) -> None:
    assert code in codes(body)


def test_a_tensor_already_on_the_host_is_read_once() -> None:
    assert codes("z = loss.detach().cpu().numpy().tolist()") == ["ZD103"]
    assert codes("z = float(loss.item())") == ["ZD101"]


def test_imported_names_and_aliases_are_resolved() -> None:
    source = """\
from torch.cuda import synchronize as wait
import torch.cuda as gpu
import torch

def train(model, loader, optimizer):
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        wait()
        gpu.synchronize()
        optimizer.zero_grad()
"""
    assert [(finding.line, finding.code) for finding in lint_source(source)] == [(9, "ZD110"), (10, "ZD110")]


def test_what_a_helper_returns_is_known_to_its_caller() -> None:
    source = """\
import torch
import torch.nn.functional as F

def score(out, y):
    return out.argmax(1).eq(y).sum(), len(y)

def train(model, loader, optimizer):
    for x, y in loader:
        out = model(x.to("cuda", non_blocking=True))
        correct, count = score(out, y.to("cuda", non_blocking=True))
        F.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        a = float(count)
        b = float(correct)
"""
    assert [(finding.line, finding.code) for finding in lint_source(source)] == [(15, "ZD102")]


def test_batches_of_a_loader_are_host_memory_until_they_are_moved() -> None:
    source = """\
import torch

def train(model, loader, optimizer, device):
    for x, y in loader:
        n = int(y.max())
        y = y.to(device, non_blocking=True)
        m = int(y.max())
        model(x, y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    assert [(finding.line, finding.code) for finding in lint_source(source)] == [(7, "ZD102")]


def test_isinstance_says_what_a_name_is_in_its_branch() -> None:
    assert codes("def unwrap(v):\n    pass\nv = batch_idx\nif isinstance(v, torch.Tensor):\n    w = float(v)") == [
        "ZD102"
    ]


@pytest.mark.parametrize(
    "source",
    [
        # a data transform works on host images
        """
class RandomCrop(torch.nn.Module):
    def forward(self, img):
        width, height = F.get_dimensions(img)
        if width > 3: img = img[:3]
        return img
""",
        # an annotation that is no tensor
        """
class Net(torch.nn.Module):
    def forward(self, x, size: Size):
        if size[0] > 3: x = x[:3]
        return x
""",
        # a flag, by its default
        """
class Net(torch.nn.Module):
    def forward(self, x, pre_logits=False):
        return x if pre_logits else self.head(x)
""",
        # numpy() works on host tensors only, so what it is called on is one
        """
def train(buffer, actor, optimizer):
    for step in range(10):
        data = buffer.sample(32)
        update(data.observations.numpy())
        optimizer.step()
        optimizer.zero_grad()
""",
        # the state of an optimizer is a dict of all kinds of things
        """
class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = torch.zeros_like(p)
                state["step"] += 1
                rate = 1 / math.sqrt(state["step"])
                p.add_(p.grad, alpha=-rate)
""",
        # iterating a dict gives its keys
        """
def train(model, loader, optimizer):
    for x in loader:
        losses = {"a": model(x).mean()}
        losses["a"].backward()
        optimizer.step()
        optimizer.zero_grad()
        for name in losses:
            print(f"{name} done")
""",
        # early return
        """
class Plot(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 100 != 0:
            return
        print(outputs["loss"].item())
""",
        # what is computed from a host tensor and something unknown is on the host
        """
class Net(torch.nn.Module):
    def forward(self, x):
        on_host = x.cpu()  # noqa: ZD103
        if (on_host * self.anchors).sum() > 0: x = x * 2
        return x
""",
        # what a device-less function of numbers returns is on the host
        """
class Net(torch.nn.Module):
    def forward(self, x):
        n = int(torch.div(x.shape[1], 2))
        return x[:, :n]
""",
    ],
)
def test_patterns_of_real_code_that_read_nothing(source: str) -> None:
    header = "import math\nimport torch\nimport torchvision.transforms.functional as F\nimport lightning as L\n"
    assert [finding.code for finding in lint_source(header + source) if finding.code < "ZD2"] == []


def test_a_variable_that_is_another_name_of_a_function_is_followed() -> None:
    source = """\
import numpy as np
import torch

wait = torch.cuda.synchronize
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor

def train(model, loader, optimizer):
    for x in loader:
        noise = Tensor(np.random.normal(0, 1, (4, 4)))
        room = Tensor(4, 4)
        model(noise).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
"""
    assert [(finding.line, finding.code) for finding in lint_source(source)] == [(9, "ZD119"), (14, "ZD110")]
