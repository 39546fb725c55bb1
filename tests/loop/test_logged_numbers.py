"""Logged numbers keep their precision, their meaning and nothing of the graph they came from."""

import csv
import gc
import json
import math
import weakref
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.parity.harness import QUIET, Net, loader
from zdtrain import Trainer


def fit(tmp_path, module, **options):
    trainer = Trainer(**{**QUIET, "default_root_dir": tmp_path, "logger": False, "max_epochs": 1, **options})
    trainer.fit(module)
    return trainer


BIG, FRACTION, INTEGER = 67_128_463.0, 0.8403041825095058, 198_487


@pytest.mark.parametrize("options", [{}, {"profiler": "simple"}], ids=str)
def test_float64_is_not_rounded_on_its_way(tmp_path, options):
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            flags = {"on_step": True, "on_epoch": True, "prog_bar": True, "batch_size": len(batch[0])}
            self.log("big", torch.tensor(BIG, dtype=torch.float64), **flags)
            self.log("fraction", torch.tensor(FRACTION, dtype=torch.float64), **flags)
            self.log("integer", INTEGER, **flags)
            return self.loss(batch)

    logger = CSVLogger(tmp_path)
    trainer = fit(tmp_path, Logs(), logger=logger, log_every_n_steps=1, records=tmp_path / "runs", **options)
    shown = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
    with open(Path(logger.log_dir, "metrics.csv"), newline="") as file:
        shown += list(csv.DictReader(file))
    (records,) = (tmp_path / "runs").rglob("metrics.jsonl")
    shown += [json.loads(line) for line in records.read_text().splitlines()]
    found = {"big": 0, "fraction": 0, "integer": 0}
    for numbers in shown:
        flat = {**numbers, **numbers["values"]} if isinstance(numbers.get("values"), dict) else numbers
        for name, expected in (("big", BIG), ("fraction", FRACTION), ("integer", INTEGER)):
            for suffix in ("_step", "_epoch"):
                value = flat.get(name + suffix)
                if value not in (None, ""):
                    found[name] += 1
                    assert float(value) == pytest.approx(expected, rel=0 if name != "fraction" else 1e-12, abs=0)
    assert min(found.values()) > 10


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 1.0), (torch.float16, 200.0)])
def test_an_epoch_of_narrow_values_is_accumulated_in_float32(tmp_path, dtype, value, reduction):
    class Logs(Net):
        samples, batch_size = 600, 2

        def training_step(self, batch, batch_idx):
            number = torch.tensor(value, dtype=dtype)
            self.log("narrow", number, on_step=False, on_epoch=True, reduce_fx=reduction, batch_size=1)
            return self.loss(batch)

    found = fit(tmp_path, Logs(), limit_val_batches=0).callback_metrics["narrow"]
    assert found.dtype == torch.float32
    assert found == (value if reduction == "mean" else 300 * value)


VALUES = [float("nan"), 3.0, 2.0, float("nan"), 1.5, float("inf"), 4.0]


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize(("mode", "best"), [("min", 1.5), ("max", math.inf)])
@pytest.mark.parametrize("when", ["epoch", "step"])
def test_a_metric_that_starts_as_nan_does_not_block_the_best_checkpoint(tmp_path, mode, best, when, top):
    class Follows(Net):
        def training_step(self, batch, batch_idx):
            if when == "step":
                self.log("value", VALUES[batch_idx])
            return self.loss(batch)

        def on_train_epoch_end(self):
            if when == "epoch":
                self.log("value", torch.tensor(VALUES[self.current_epoch]))

        def train_dataloader(self):
            return loader(28, 4)

    every = {"every_n_train_steps": 1} if when == "step" else {}
    checkpoint = ModelCheckpoint(tmp_path, monitor="value", mode=mode, save_top_k=top, filename="{step}", **every)
    fit(
        tmp_path,
        Follows(),
        callbacks=[checkpoint],
        enable_checkpointing=True,
        max_epochs=len(VALUES) if when == "epoch" else 1,
        limit_val_batches=0,
    )
    assert checkpoint.best_model_score == best
    assert Path(checkpoint.best_model_path).exists()
    kept = [float(score) for score in checkpoint.best_k_models.values()]
    assert len(kept) == top
    assert not any(math.isnan(score) for score in kept)


@pytest.mark.parametrize("on_epoch", [True, False])
def test_the_record_of_numbers_that_are_not_finite_is_strict_json(tmp_path, on_epoch):
    values = [1.0, float("nan"), float("inf"), float("-inf"), 2.0]

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("value", torch.tensor(values[batch_idx]), on_step=True, on_epoch=on_epoch)
            return self.loss(batch)

    fit(tmp_path, Logs(), records=tmp_path, log_every_n_steps=1)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    files = [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]
    documents = [
        json.loads(text, parse_constant=refuse)
        for file in files
        for text in (file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()])
    ]
    rows = [row for row in documents if isinstance(row, dict) and "value" in str(row)]
    text = json.dumps(rows)
    assert "1.0" in text
    assert "2.0" in text
    assert len(rows) >= len(values)  # the others are marked, not dropped


class Token:
    pass


class Tag(torch.autograd.Function):
    """Ties a token's life to the graph's."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Watches(Callback):
    """Looks at everything after each batch, as a curious callback does."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        looked = [outputs, trainer.callback_metrics, trainer.logged_metrics]
        for value in [value for mapping in looked for value in mapping.values()]:
            assert not (isinstance(value, torch.Tensor) and value.requires_grad)
        if batch_idx in (10, 39):
            gc.collect()
            tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            module.alive.append((sum(token() is not None for token in module.tokens), tensors))


@pytest.mark.parametrize("flags", [{"on_epoch": True}, {"on_epoch": False}, {"reduce_fx": "max", "on_epoch": True}])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"profiler": "simple"}], ids=str)
def test_no_graph_outlives_its_step(tmp_path, flags, options):
    class Tagged(Net):
        samples, batch_size = 160, 4

        def __init__(self):
            super().__init__()
            self.tokens, self.alive = [], []

        def training_step(self, batch, batch_idx):
            token = Token()
            self.tokens.append(weakref.ref(token))
            loss = Tag.apply(self.loss(batch), token)
            self.log("loss", loss, on_step=True, prog_bar=True, **flags)
            return {"loss": loss, "extra": loss.detach()}

    module = Tagged()
    fit(tmp_path, module, callbacks=[Watches()], logger=CSVLogger(tmp_path), limit_val_batches=0, **options)
    (first_graphs, first_tensors), (graphs, tensors) = module.alive
    assert max(first_graphs, graphs) <= 3
    assert tensors - first_tensors < 20
