import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from zdtrain.records.encoding import decode_float, dump_document, dump_line, encode_float, to_plain


def strict(text):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, 1e-300, 1.7976931348623157e308, 2.0])
def test_finite_floats_survive_to_the_last_bit(value):
    restored = decode_float(strict(dump_line({"v": value}))["v"])
    assert restored == value
    assert math.copysign(1, restored) == math.copysign(1, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_floats_stay_apart_for_a_strict_reader(value):
    stored = strict(dump_line({"v": value}))["v"]
    assert isinstance(stored, str)
    assert str(decode_float(stored)) == str(value)
    assert len({encode_float(v) for v in (math.nan, math.inf, -math.inf)}) == 3


def test_objects_that_hyperparameters_hold_become_plain_json():
    @dataclass
    class Block:
        width: int

    hparams = {
        "lr": torch.tensor(0.5),
        "path": Path("a/b"),
        "betas": (0.9, float("nan")),
        "block": Block(3),
        "flag": True,
        "optimizer": torch.optim.SGD,
        3: {"set": {1}},
    }
    assert strict(dump_document(hparams)) == {
        "lr": 0.5,
        "path": "a/b",
        "betas": [0.9, "NaN"],
        "block": {"width": 3},
        "flag": True,
        "optimizer": "torch.optim.sgd.SGD",
        "3": {"set": [1]},
    }


def test_no_object_keeps_the_others_from_being_written():
    class Refuses:
        ndim = 0

        def item(self):
            raise RuntimeError

        __repr__ = item

    @dataclass
    class Partial:
        known: int
        unknown: int = field(init=False)

    around: dict[str, object] = {"x": [1]}
    around["itself"] = [around]
    hparams = {"refuses": Refuses(), "partial": Partial(1), "meta": torch.ones((), device="meta"), "around": around}
    stored = strict(dump_document({**hparams, "twice": [around["x"], around["x"]]}))
    assert stored["refuses"].endswith("Refuses>")
    assert stored["partial"] == {"known": 1}
    assert stored["meta"] == "<torch.Tensor>"
    assert stored["around"] == {"x": [1], "itself": ["..."]}
    assert stored["twice"] == [[1], [1]]


def test_numbers_that_only_look_like_numbers_become_numbers():
    import numpy as np

    assert to_plain(np.float32(0.5)) == 0.5
    assert type(to_plain(np.int64(3))) is int
