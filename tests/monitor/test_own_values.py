"""The gradient norm and the learning rate that monitors see, against what the optimizer used."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zdtrain.monitors import Threshold

from .runs import run


class Heads(LightningModule):
    """A trunk with two heads of different shapes and as many parameters; batches use them in turns."""

    def __init__(self, hidden=8, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, hidden)
        self.heads = nn.ModuleList([nn.Linear(hidden, 2), nn.Linear(hidden, 5)]).to(dtype)
        self.used = []

    def training_step(self, batch, batch_idx):
        head = self.heads[batch_idx % 3 % 2]
        return head(self.trunk(batch[0]).relu().to(head.weight.dtype)).float().square().mean()

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad.detach() for p in self.parameters() if p.grad is not None]
        wide = {torch.float32 if g.dtype is torch.bfloat16 else g.dtype for g in grads}
        parts = [g.to(max(wide, key=lambda dtype: dtype.itemsize)).reshape(-1) for g in grads]
        self.used.append(float(torch.linalg.vector_norm(torch.cat(parts))))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class WithGraph(Heads):
    """Keeps the graph of its gradients."""

    def backward(self, loss):
        loss.backward(create_graph=True)


class Channels(Heads):
    """Has a gradient that is dense but not in row-major order."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        image = batch[0].new_ones(2, 2, 4, 4).to(memory_format=torch.channels_last) * batch[0].mean()
        return super().training_step(batch, batch_idx) + self.convolution(image).square().mean()


class Complex(Heads):
    """Has a complex parameter."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.heads = nn.ModuleList([nn.Linear(8, 3, dtype=torch.complex64), nn.Linear(8, 4, dtype=torch.complex64)])
        self.trunk = nn.Linear(4, 8, dtype=torch.complex64)

    def training_step(self, batch, batch_idx):
        out = self.heads[batch_idx % 2](torch.tanh(self.trunk(batch[0].to(torch.complex64))))
        return (out * self.phase.sum()).abs().square().mean()


class Batches(Dataset):
    """Twelve batches."""

    def __init__(self):
        self.x = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return (self.x[index],)


MODULES = {
    "other parameters each step": lambda: Heads(),
    "half precision": lambda: Heads(dtype=torch.bfloat16),
    "double precision": lambda: Heads(dtype=torch.float64),
    "large": lambda: Heads(hidden=5000),
    "with a graph": lambda: WithGraph(),
    "channels last": lambda: Channels(),
    "complex": lambda: Complex(),
}


@pytest.mark.parametrize("then", ["told", "clip"])
@pytest.mark.parametrize("name", MODULES)
def test_the_norm_is_that_of_the_gradients_that_the_optimizer_uses(name, then):
    module, heard = MODULES[name](), []
    monitors = [Threshold("grad_norm", above=-1.0, then=heard.append)]
    if then == "clip":
        monitors.append(Threshold("grad_norm", above=0.2, then="clip"))
    run(module, DataLoader(Batches(), batch_size=None), monitors=monitors)
    assert [event.values["grad_norm"] for event in heard] == pytest.approx(module.used, rel=1e-6)
    assert len(set(module.used)) == len(module.used) == 12


@pytest.mark.parametrize("change", ["bfloat16", "number and back", "memory"])
def test_the_learning_rate_is_that_of_the_update(change):
    used, heard = [], []

    class Rates(Heads):
        def on_train_batch_start(self, batch, batch_idx):
            group, value = self.optimizers().param_groups[0], 0.1 / 2**batch_idx
            if change == "number and back":
                group["lr"] = value if batch_idx % 2 else self.rate
            elif change == "memory":
                group["lr"].data = torch.tensor(value)
            else:
                group["lr"].fill_(value)
            used.append(float(group["lr"]))

        def configure_optimizers(self):
            self.rate = torch.tensor(0.1, dtype=torch.bfloat16 if change == "bfloat16" else torch.float32)
            return torch.optim.SGD(self.parameters(), lr=self.rate)

    run(Rates(), DataLoader(Batches(), batch_size=None), monitors=[Threshold("lr", above=0.0, then=heard.append)])
    assert [event.values["lr"] for event in heard] == used
