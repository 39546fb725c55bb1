"""Training runs to compare: the same module with and without captured steps."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import zdtrain
from zdtrain.capture.report import CaptureReport

FEATURES, CLASSES = 8, 3
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves behind."""

    weights: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    rows: str
    metrics: dict[str, Tensor]
    rng: Tensor
    report: CaptureReport
    module: Any
    trainer: Any


class Classifier(pl.LightningModule):
    """Logs its loss per step and epoch; subclasses change one thing each."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Metered(Classifier):
    """Updates metrics, and replaces a buffer."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)
        self.error = MeanSquaredError()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.accuracy(out, y)
        self.error.update(out.softmax(1)[:, 0].contiguous(), (y == 0).float())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("error", self.error, on_epoch=True)
        return {"loss": loss, "out": out}


def batches(n: int = 12, size: int = 8, rest: int = 0) -> DataLoader[Any]:
    """Return a loader of `n` batches, and of one more with `rest` samples."""
    generator = torch.Generator().manual_seed(1)
    total = n * size + rest
    x = torch.randn(total, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (total,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def fit(folder: Path, make: Any, capture: str, *, loader: Any = None, ckpt_path: Any = None, **options: Any) -> Outcome:
    """Train with `capture` and return what is left."""
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(7)
    options = {k: v() if k == "callbacks" else v for k, v in options.items()}
    logger = CSVLogger(str(folder), name=f"{capture}-{len(list(folder.iterdir()))}")
    trainer = zdtrain.Trainer(**{"max_epochs": 4, **QUIET, "logger": logger, "capture": capture, **options})
    trainer.fit(module, batches() if loader is None else loader(), ckpt_path=ckpt_path)
    text = Path(logger.log_dir, "metrics.csv")
    return Outcome(
        weights={name: tensor.clone() for name, tensor in module.state_dict().items()},
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        rows=text.read_text() if text.exists() else "",
        metrics=dict(trainer.callback_metrics),
        rng=random_state(),
        report=trainer.capture_report,
        module=module,
        trainer=trainer,
    )


def random_state() -> Tensor:
    """Return the states of the host's generator and of the GPU's, where there is one."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return torch.cat([torch.get_rng_state(), *on_gpu])


def assert_same(eager: Outcome, captured: Outcome) -> None:
    """Compare two runs bit for bit."""
    assert_equal(eager.weights, captured.weights, "weights")
    assert_equal(eager.optimizers, captured.optimizers, "optimizers")
    assert_equal(eager.metrics, captured.metrics, "metrics")
    assert eager.rows == captured.rows
    assert torch.equal(eager.rng, captured.rng)


def assert_equal(want: Any, have: Any, name: str) -> None:
    """Compare nested containers bit for bit."""
    if isinstance(want, Tensor):
        assert isinstance(have, Tensor), f"{name}: {type(have)}"
        assert want.dtype == have.dtype, f"{name}: {have.dtype} instead of {want.dtype}"
        assert torch.equal(want, have) or bool((want.isnan() & have.isnan()).all()), f"{name}: {want} != {have}"
    elif isinstance(want, dict):
        assert list(want) == list(have), f"{name}: {list(want)} != {list(have)}"
        for key, value in want.items():
            assert_equal(value, have[key], f"{name}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(want) == len(have), name
        for index, pair in enumerate(zip(want, have, strict=True)):
            assert_equal(*pair, f"{name}[{index}]")
    else:
        assert want == have, f"{name}: {want!r} != {have!r}"


def both(folder: Path, make: Any, capture: str = "graph", **options: Any) -> Outcome:
    """Train eagerly and captured, compare bit for bit, and return the captured run."""
    eager = fit(folder, make, "off", **options)
    captured = fit(folder, make, capture, **options)
    assert_same(eager, captured)
    return captured


def codes(outcome: Outcome) -> set[str]:
    """Return the codes of the reasons for eager steps."""
    return {reason.code for reason in outcome.report.fallbacks}


def trap_line(cls: type) -> int:
    """Return the line of a class that is marked as its trap."""
    lines, first = inspect.getsourcelines(cls)
    return first + next(i for i, line in enumerate(lines) if line.endswith("# trap\n"))
