"""What a step reads past its module, and what changes long after the step was recorded: trained right all the same."""

import cProfile
import gc
import logging
import pstats
import random
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, TensorDataset

from tests.capture.runs import Classifier, batches, both, codes, fit
from tests.capture.test_traps import Deterministic

COUNTS = {"n": 0}
CONFIG = SimpleNamespace(weight=1.0)
GENERATOR = np.random.default_rng(0)
CONTEXT: ContextVar[float] = ContextVar("weight", default=1.0)


class Settings:
    weight = 1.0


class Ramp:
    """A schedule of the user's own."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        return 1 + self.n // 7


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def reset() -> None:
    global GENERATOR
    COUNTS["n"], CONFIG.weight, Settings.weight, Weighs.weight = 0, 1.0, 1.0, 1.0
    GENERATOR = np.random.default_rng(0)
    if "weight" in vars(WeighsByClass):
        del WeighsByClass.weight
    WeighsByDefault.training_step.__defaults__[0]["n"] = 0


class Weighs(Deterministic):
    """Multiplies the loss by a number that becomes another one in the ninth step of each epoch, late for any watch."""

    weight = 1.0

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.weigh()

    def weigh(self):
        return self.weight

    def on_train_batch_end(self, outputs, batch, batch_idx):
        COUNTS["n"] += 1
        if batch_idx == 7:
            self.change()

    def change(self):
        type(self).weight = 2.0


class WeighsByClass(Weighs):
    def weigh(self):
        return type(self).weight


class WeighsBySettings(Weighs):
    def weigh(self):
        return Settings.weight

    def change(self):
        Settings.weight = 2.0


class WeighsByConfig(Weighs):
    def weigh(self):
        return CONFIG.weight

    def change(self):
        CONFIG.weight = 2.0


def closure() -> type:
    weight = 1.0

    class WeighsByClosure(Weighs):
        def weigh(self):
            return weight

        def change(self):
            nonlocal weight
            weight = 2.0

        def on_fit_start(self):
            nonlocal weight
            weight = 1.0

    return WeighsByClosure


class WeighsByImport(Weighs):
    def weigh(self):
        from tests.capture import outside

        return outside.weight

    def change(self):
        from tests.capture import outside

        outside.weight = 2.0

    def on_fit_start(self):
        from tests.capture import outside

        outside.weight = 1.0


class WeighsByImportedName(WeighsByImport):
    def weigh(self):
        from tests.capture.outside import weight

        return weight


class WeighsByText(WeighsByConfig):
    def weigh(self):
        return globals()["CONFIG"].weight


class WeighsByNested(Weighs):
    class Options:
        weight = 1.0

    def weigh(self):
        return self.Options.weight

    def change(self):
        self.Options.weight = 2.0

    def on_fit_start(self):
        self.Options.weight = 1.0


class WeighsByEnum(WeighsByNested):
    class Options(Enum):
        HELD = SimpleNamespace(weight=1.0)

    def weigh(self):
        return self.Options.HELD.value.weight

    def change(self):
        self.Options.HELD.value.weight = 2.0

    def on_fit_start(self):
        self.Options.HELD.value.weight = 1.0


class WeighsByTrainer(Weighs):
    def weigh(self):
        return getattr(self.trainer, "weight", 1.0)

    def change(self):
        self.trainer.weight = 2.0


class Holds:
    weight = 1.0

    def give(self):
        return self.weight


class WeighsByMethod(Weighs):
    def __init__(self):
        super().__init__()
        self.held = Holds()
        self.give = self.held.give

    def weigh(self):
        return self.give()

    def change(self):
        self.held.weight = 2.0


class WeighsByWeakReference(WeighsByMethod):
    def __init__(self):
        super().__init__()
        self.give = weakref.ref(self.held)

    def weigh(self):
        return self.give().weight


class WeighsByContext(Weighs):
    def weigh(self):
        return CONTEXT.get()

    def change(self):
        CONTEXT.set(2.0)

    def on_fit_start(self):
        CONTEXT.set(1.0)


class IsLast(Weighs):
    def weigh(self):
        return 2.0 if self.trainer.is_last_batch else 1.0


class ReadsRate(Weighs):
    def weigh(self):
        return 1 + self.optimizers().param_groups[0]["lr"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    "module",
    [
        *(Weighs, WeighsByClass, WeighsBySettings, WeighsByConfig, closure(), WeighsByImport, WeighsByImportedName),
        *(WeighsByText, WeighsByNested, WeighsByEnum, WeighsByTrainer, WeighsByMethod, WeighsByWeakReference),
        *(WeighsByContext, IsLast, ReadsRate),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_value_past_the_module_is_part_of_the_key(tmp_path, module):
    def make():
        reset()
        return module()

    run = both(tmp_path, make)
    assert not codes(run)
    assert run.report.steps_replayed > 15


class CountsInGlobal(Weighs):
    def weigh(self):
        return 1 + COUNTS["n"] // 7


class CountsInTheStep(Weighs):
    def training_step(self, batch, batch_idx):
        COUNTS["n"] += 1
        return self.loss(batch) * (1 + COUNTS["n"] // 7)

    def on_train_batch_end(self, *args):
        pass


class WeighsByDefault(Weighs):
    def training_step(self, batch, batch_idx, state={"n": 0}):  # noqa: B006
        state["n"] += 1
        return self.loss(batch) * (1 + state["n"] // 7)


class DrawsFromGlobal(Weighs):
    def weigh(self):
        return 2.0 if GENERATOR.random() < 0.1 else 1.0


class DrawsFromOwn(Weighs):
    make: Callable = staticmethod(random.Random)

    def __init__(self):
        super().__init__()
        self.rng = self.make(0)

    def weigh(self):
        return 2.0 if self.rng.random() < 0.1 else 1.0


class DrawsFromOwnNumpy(DrawsFromOwn):
    make = staticmethod(np.random.default_rng)


class Ramps(Weighs):
    def __init__(self):
        super().__init__()
        self.ramp = Ramp()

    def weigh(self):
        return self.ramp()

    def change(self):
        pass

    def on_train_batch_end(self, *args):
        self.ramp.n += 1


class CountsInSlots(Ramps):
    def __init__(self):
        super().__init__()
        self.ramp = Slotted()

    def weigh(self):
        return 1 + self.ramp.n // 7


@pytest.mark.parametrize(
    "module",
    [
        *(CountsInGlobal, CountsInTheStep, WeighsByDefault, DrawsFromGlobal, DrawsFromOwn, DrawsFromOwnNumpy),
        *(Ramps, CountsInSlots),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_value_that_goes_on_changing_is_named(tmp_path, module):
    def make():
        reset()
        return module()

    run = both(tmp_path, make)
    reason = next(reason for reason in run.report.fallbacks if reason.code == "python-state")
    is_typed_in = __file__ == "<string>"  # where classes have no lines to name
    assert reason.file == __file__ or "ramp" in reason.message or is_typed_in
    assert run.report.steps_replayed == 0


class ReadsLoop(Weighs):
    def weigh(self):
        return 2.0 if self.trainer.fit_loop.epoch_loop.batch_idx % 7 == 6 else 1.0


class ClipsByLoop(Deterministic):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        late = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready % 7 == 6
        self.clip_gradients(optimizer, 0.1 if late else 5.0, "norm")


class ReadsSchedule(ReadsRate):
    def weigh(self):
        return 1 + self.lr_schedulers().get_last_lr()[0]


class ReadsClock(Weighs):
    def weigh(self):
        return 1.0 if time.perf_counter() else 2.0


class StartsThread(Weighs):
    def weigh(self):
        with ThreadPoolExecutor(1) as others:
            return others.submit(lambda: CONFIG.weight).result()


class PrintsByModule(Weighs):
    def weigh(self):
        self.print("here", end="")
        return 1.0


class Warns(Weighs):
    def weigh(self):
        warnings.warn("here", stacklevel=1)
        return 1.0


class WritesToStream(Weighs):
    def weigh(self):
        sys.stdout.write("here")
        return 1.0


class LogsRecord(Weighs):
    def weigh(self):
        logging.getLogger("zdtrain.tests").error("here")
        return 1.0


class LooksForFile(Weighs):
    def weigh(self):
        return 1.0 if Path(sys.executable).exists() else 2.0


class CallsLogger(Weighs):
    def __init__(self):
        super().__init__()
        self.own = [DummyLogger()]

    def weigh(self):
        self.own[0].log_metrics({"here": 1.0})
        return 1.0


class Prints(Deterministic):
    def training_step(self, batch, batch_idx):
        print("here", end="")
        return self.loss(batch)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        (ReadsLoop, "trainer-state"),
        (ClipsByLoop, "trainer-state"),
        (ReadsSchedule, "trainer-state"),
        (ReadsClock, "host-clock"),
        (Prints, "side-effect"),
        *((kind, "side-effect") for kind in (PrintsByModule, Warns, WritesToStream, LogsRecord, LooksForFile)),
        *((kind, "side-effect") for kind in (CallsLogger, StartsThread)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_has_no_value_to_compare_is_refused_with_its_line(tmp_path, module, code):
    def make():
        reset()
        return module()

    run = both(tmp_path, make)
    assert (code, __file__) in {(reason.code, reason.file) for reason in run.report.fallbacks if reason.line}
    assert run.report.steps_replayed == 0


def test_a_python_profiler_goes_on_while_steps_are_watched(tmp_path):
    profiler = cProfile.Profile()
    with profiler:
        run = fit(tmp_path, Deterministic, "graph")
    assert run.report.steps_replayed > 20
    assert sys.getprofile() is None
    calls = [stat[1] for (_, _, name), stat in pstats.Stats(profiler).stats.items() if name == "advance"]
    assert max(calls) == run.report.steps_replayed + run.report.steps_eager  # seen behind the watched steps, too


def test_variables_of_an_earlier_module_with_the_same_code_may_go(tmp_path):
    def made(weight):
        class Net(Classifier):
            def training_step(self, batch, batch_idx):
                return weight * super().training_step(batch, batch_idx)

        return Net

    held = [made(2.0)]

    class Forgets(TensorDataset):
        def __getitem__(self, index):
            if index == 50:  # in the seventh step, of twelve
                held.clear()
                gc.collect()
            return super().__getitem__(index)

    loader = lambda: DataLoader(Forgets(*batches().dataset.tensors), batch_size=8)  # noqa: E731
    run = fit(tmp_path, made(0.5), "graph", max_epochs=1, loader=loader)
    assert not held
    assert codes(run) == set()
    assert [program.captures for program in run.report.programs] == [1]
