"""What user code puts in the place of something else in the middle of an epoch is heeded, whatever kind it is."""

import copy
import functools

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.capture.runs import CLASSES, FEATURES, batches, both, codes
from tests.capture.test_traps import Deterministic
from zdtrain.optim import SimpleAdam

LATE = 10  # of 16 batches


def once(x, y):
    return F.cross_entropy(x, y)


def twice(x, y):
    return 2 * F.cross_entropy(x, y)


LOSS = once
WEIGHT = torch.ones(())
GATE = nn.Tanh()


def reset():
    global LOSS, WEIGHT, GATE
    LOSS, WEIGHT, GATE = once, torch.ones(()), nn.Dropout(0.5)
    ByClass.weight, ByClass.measure = torch.ones(()), staticmethod(once)
    Head.forward = Head.plain
    Doubled.by = 1


class Late(Deterministic):
    """Changes something in the middle of an epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == LATE:
            self.change()


class ByGlobalFunction(Late):
    def loss(self, batch):
        return LOSS(self.net(batch[0]), batch[1])

    def change(self):
        global LOSS
        LOSS = twice


class ByGlobalTensor(Late):
    def loss(self, batch):
        return super().loss(batch) * WEIGHT

    def change(self):
        global WEIGHT
        WEIGHT = torch.tensor(3.0)


class ByGlobalModule(Late):
    def loss(self, batch):
        return F.cross_entropy(GATE(self.net(batch[0])), batch[1])

    def change(self):
        GATE.eval()


class ByListedModule(Late):
    def __init__(self):
        super().__init__()
        self.listed = [nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES).requires_grad_(False)]

    def loss(self, batch):
        dropout, linear = self.listed
        return F.cross_entropy(linear(dropout(self.net(batch[0]))), batch[1])

    def change(self):
        self.listed[0].p = 0.1


class ByListedParameter(ByListedModule):
    def change(self):
        linear = self.listed[1]
        linear.weight = nn.Parameter(linear.weight * 2, requires_grad=False)


class ByClass(Late):
    weight = torch.ones(())
    measure = staticmethod(once)

    def loss(self, batch):
        return self.measure(self.net(batch[0]), batch[1]) * self.weight

    def change(self):
        ByClass.weight = torch.tensor(3.0)


class ByClassFunction(ByClass):
    def change(self):
        ByClass.measure = staticmethod(twice)


class Head(nn.Module):
    def plain(self, x):
        return x * 1

    forward = plain


class ByPatchedForward(Late):
    def __init__(self):
        super().__init__()
        self.net.append(Head())

    def change(self):
        Head.forward = lambda self, x: x * 2


class Doubled(torch.autograd.Function):
    by = 1

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * Doubled.by


class ByCustomFunction(Late):
    def loss(self, batch):
        return Doubled.apply(super().loss(batch))

    def change(self):
        Doubled.by = 2


def by_closure():
    weight = torch.ones(())

    class ByClosure(Late):
        def loss(self, batch):
            return super().loss(batch) * weight

        def change(self):
            nonlocal weight
            weight = torch.tensor(3.0)

    return ByClosure()


class ByActivation(Late):
    def change(self):
        self.net[1] = nn.Sigmoid()


class ByPartial(Late):
    """Makes the function anew in every step."""

    def on_train_batch_start(self, batch, batch_idx):
        self.measure = functools.partial(F.cross_entropy, label_smoothing=batch_idx // LATE / 2)

    def loss(self, batch):
        return self.measure(self.net(batch[0]), batch[1])


class ByLambda(ByPartial):
    def on_train_batch_start(self, batch, batch_idx):
        weight = 1 + batch_idx // LATE
        self.measure = lambda x, y: F.cross_entropy(x, y) * weight


class ByBufferShape(Late):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(1))

    def loss(self, batch):
        return super().loss(batch) * self.weight.sum() / self.weight.numel() ** 2

    def change(self):
        self.weight.data = torch.ones(2)


class ByGradient(Late):
    def __init__(self):
        super().__init__()
        self.weight = torch.tensor(2.0)

    def loss(self, batch):
        return super().loss(batch) * (self.weight.detach() if self.weight.requires_grad else 3)

    def change(self):
        self.weight = torch.tensor(2.0, requires_grad=True)


class ByKind(Late):
    def __init__(self):
        super().__init__()
        self.weight = 2

    def loss(self, batch):
        return super().loss(batch) * (1 if isinstance(self.weight, int) else 3)

    def change(self):
        self.weight = 2.0


class ByLongList(Late):
    def __init__(self):
        super().__init__()
        self.weights = [1.0] * 200

    def loss(self, batch):
        return super().loss(batch) * self.weights[100]

    def change(self):
        self.weights[100] = 3.0


class WhileMoving(Deterministic):
    """Changes what the step reads where batches are moved to the device."""

    weight, n = 1.0, 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.n += 1
        self.weight = 1.0 if self.n < LATE else 3.0
        return batch

    def loss(self, batch):
        return super().loss(batch) * self.weight


KINDS = [
    *(ByGlobalFunction, ByGlobalTensor, ByGlobalModule, ByListedModule, ByListedParameter, ByClass, ByClassFunction),
    *(ByPatchedForward, ByCustomFunction, by_closure, ByActivation, ByPartial, ByLambda, ByBufferShape, ByGradient),
    *(ByKind, ByLongList, WhileMoving),
]


@pytest.mark.parametrize("module", KINDS, ids=lambda kind: kind.__name__)
def test_what_the_step_uses_may_be_another_from_any_batch_on(tmp_path, module):
    def make():
        reset()
        return module()

    run = both(tmp_path, make, max_epochs=2, loader=lambda: batches(16))
    assert not codes(run)
    assert run.report.steps_replayed > 10


def test_what_a_lambda_callback_changes_is_heeded(tmp_path):
    def change(trainer, module, batch, batch_idx):
        module.weight = 1 + batch_idx // LATE

    class Net(Deterministic):
        def loss(self, batch):
            return super().loss(batch) * self.weight

    run = both(tmp_path, Net, callbacks=lambda: [LambdaCallback(on_train_batch_start=change)], max_epochs=2)
    assert run.report.steps_replayed > 10


class ByOptimizer(Late):
    kind = torch.optim.Adam

    def configure_optimizers(self):
        return self.kind(self.parameters(), 0.01)

    @property
    def optimizer(self):
        return self.optimizers(use_pl_optimizer=False)

    @property
    def other_states(self):
        return list(self.optimizer.state.values())[1:]


class ForgetsOne(ByOptimizer):
    def change(self):
        del self.optimizer.state[self.net[2].weight]


class RestartsMoments(ByOptimizer):
    def change(self):
        for state in self.other_states:
            state.update({name: torch.zeros_like(value) for name, value in state.items()})


class RestartsFused(RestartsMoments):
    kind = functools.partial(torch.optim.Adam, fused=True)


class RestartsSimple(RestartsMoments):
    kind = SimpleAdam


class RestartsMomentum(RestartsMoments):
    kind = functools.partial(torch.optim.SGD, momentum=0.9)


class PatchesStep(ByOptimizer):
    def change(self):
        step = self.optimizer.step

        def shrinking(closure=None):
            loss = step(closure)
            torch._foreach_mul_([p.data for p in self.parameters()], 0.9)
            return loss

        self.optimizer.step = shrinking


class HooksStep(ByOptimizer):
    def change(self):
        self.optimizer.register_step_post_hook(lambda *_: torch._foreach_mul_([p.data for p in self.parameters()], 0.9))


class ReplacesOptimizer(ByOptimizer):
    def change(self):
        self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.5)]


@pytest.mark.parametrize(
    "module",
    [
        *(ForgetsOne, RestartsMoments, RestartsFused, RestartsSimple, RestartsMomentum, PatchesStep, HooksStep),
        ReplacesOptimizer,
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_an_optimizer_does_may_be_another_from_any_batch_on(tmp_path, module):
    assert both(tmp_path, module, max_epochs=2, loader=lambda: batches(16)).report.steps_replayed > 10


class HooksModule(Late):
    def change(self):
        self.net[2].register_forward_hook(lambda module, args, out: out * 2)


class HooksParameter(Late):
    def change(self):
        self.net[2].weight.register_hook(lambda grad: grad * 2)


@pytest.mark.parametrize("module", [HooksModule, HooksParameter], ids=lambda kind: kind.__name__)
def test_a_hook_registered_in_mid_epoch_is_called_from_then_on(tmp_path, module):
    run = both(tmp_path, module, max_epochs=2, loader=lambda: batches(16))
    assert "tensor-hook" in codes(run)
    assert 0 < run.report.steps_replayed < LATE


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_that_is_in_the_batch_twice_makes_a_program_of_its_own(tmp_path, first):
    generator = torch.Generator().manual_seed(3)
    pairs = [torch.randn(2, 8, FEATURES, generator=generator).unbind() for _ in range(16)]
    data = [(x, x if (i < LATE) is first else y.clone()) for i, (x, y) in enumerate(pairs)]

    class Net(Deterministic):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(FEATURES, FEATURES)

        def loss(self, batch):
            return F.mse_loss(self.net(batch[0]), batch[1])

    run = both(tmp_path, Net, max_epochs=2, loader=lambda: DataLoader(copy.copy(data), batch_size=None))
    assert not codes(run)
    assert run.report.steps_replayed > 10


def test_a_batch_that_the_step_takes_apart_is_named(tmp_path):
    class Net(Deterministic):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"x": batch[0], "y": batch[1]}

        def loss(self, batch):
            return F.cross_entropy(self.net(batch["x"]), batch.pop("y"))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("left", float(len(batch)))

    assert "python-state" in codes(both(tmp_path, Net, max_epochs=2))


def test_an_expanded_batch_can_be_captured(tmp_path):
    x = torch.ones(8, 1).expand(8, FEATURES)
    data = [(x, torch.full((8,), i % CLASSES)) for i in range(12)]
    run = both(tmp_path, Deterministic, max_epochs=2, loader=lambda: DataLoader(data, batch_size=None))
    assert run.report.steps_replayed > 10


def test_another_autocast_makes_a_program_of_its_own(tmp_path):
    class Net(Deterministic):
        def on_train_batch_start(self, batch, batch_idx):
            torch.set_autocast_dtype("cpu", torch.float16 if batch_idx >= LATE else torch.bfloat16)

        def loss(self, batch):
            with torch.autocast("cpu"):
                return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    before = torch.get_autocast_dtype("cpu")
    try:
        run = both(tmp_path, Net, max_epochs=2, loader=lambda: batches(16))
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert run.report.steps_replayed > 10


def test_an_iterator_that_the_step_moves_on_is_named(tmp_path):
    class Net(Deterministic):
        def __init__(self):
            super().__init__()
            self.weights = iter([1.0] * LATE + [3.0] * 100)

        def loss(self, batch):
            return super().loss(batch) * next(self.weights)

    assert "python-state" in codes(both(tmp_path, Net, max_epochs=2))
