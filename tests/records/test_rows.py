import json
import math
import statistics
from array import array
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zdtrain.records.encoding import dump_line
from zdtrain.records.rows import EpochTable, MetricStatistics, Row, RowMerger, encode_rows, joined
from zdtrain.records.types import StepRecord, StepTable


def training(step, epoch=0, **values):
    return StepRecord(step=step, epoch=epoch, batch_idx=step, values=values, wall_time=float(step))


def logged(step, epoch=None, **values):
    return StepRecord(step=step, epoch=epoch, values=values, wall_time=step + 0.5)


def rows_of(records):
    merger = RowMerger()
    return [row for record in records for row in merger.add(record)] + merger.close()


def test_training_and_logger_values_of_a_step_share_its_row():
    rows = rows_of([training(0, loss=1.0), logged(0, epoch=0, loss=1.0), training(1, loss=2.0), logged(1, val=3.0)])
    assert [(row.step, row.values) for row in rows] == [(0, {"loss": 1.0}), (1, {"loss": 2.0, "val": 3.0})]


def test_learning_rates_that_come_before_lagging_training_values_find_their_row():
    rows = rows_of([training(0, loss=1.0), logged(2, lr=0.2), training(1, loss=2.0), training(2, loss=3.0)])
    assert [(row.step, row.values) for row in rows] == [
        (0, {"loss": 1.0}),
        (1, {"loss": 2.0}),
        (2, {"lr": 0.2, "loss": 3.0}),
    ]


def test_micro_batches_of_an_accumulation_window_make_one_row():
    rows = rows_of([training(0, loss=1.0), training(0, loss=2.0), training(1, loss=3.0)])
    assert [(row.step, row.values) for row in rows] == [(0, {"loss": 2.0}), (1, {"loss": 3.0})]


def test_rows_from_loggers_alone_are_sealed_by_the_next_step():
    rows = rows_of([logged(9, epoch=0, loss=1.0), logged(9, val=2.0), logged(19, epoch=1, loss=3.0)])
    assert [(row.step, row.epoch, row.values) for row in rows] == [
        (9, 0, {"loss": 1.0, "val": 2.0}),
        (19, 1, {"loss": 3.0}),
    ]


def test_a_row_without_epoch_belongs_to_the_current_one():
    assert [row.epoch for row in rows_of([training(0, epoch=4, loss=1.0), logged(7, x=1.0)])] == [4, 4]


def test_open_rows_stay_bounded_when_training_values_never_come():
    merger = RowMerger()
    merger.add(training(0, loss=1.0))
    sealed = [row for step in range(1, 5000) for row in merger.add(logged(step, x=1.0))]
    assert len(sealed) > 3900


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=1, max_size=9))
def test_epoch_statistics_equal_a_float64_reference_however_values_are_grouped(groups):
    running = MetricStatistics()
    for group in groups:
        running.take(group)
    values = [value for group in groups for value in group]
    result = running.as_dict()
    assert result["mean"] == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-9)
    assert result["variance"] == pytest.approx(statistics.pvariance(values), rel=1e-6, abs=1e-6)
    assert (result["min"], result["max"], result["count"]) == (min(values), max(values), len(values))
    assert result["last"] == values[-1]


def test_nonfinite_values_are_counted_apart():
    running = MetricStatistics()
    running.take([1.0, math.nan, math.inf, 3.0])
    assert running.as_dict() == {
        "mean": 2.0,
        "variance": 1.0,
        "min": 1.0,
        "max": 3.0,
        "count": 2,
        "last": 3.0,
        "num_nonfinite": 2,
    }


def test_a_metric_that_was_never_finite_has_no_mean():
    running = MetricStatistics()
    running.take([math.nan])
    assert running.as_dict()["mean"] is None
    assert running.as_dict()["min"] is None


@given(
    st.lists(st.floats() | st.integers(-5, 5) | st.booleans(), max_size=6),
    st.sampled_from(["loss", 'a"quote', "100%", "%s", "ö\\n"]),
    st.none() | st.integers(0, 3),
)
def test_rows_that_are_alike_are_encoded_as_one_by_one(values, name, epoch):
    rows = [
        Row(step=step, epoch=epoch, batch_idx=step or None, wall_time=1.7e9 + step / 7, values={name: value, "b": 1.5})
        for step, value in enumerate(values)
    ]
    encoded = [line for table in joined(row.as_table() for row in rows) for line in encode_rows(table)]
    expected = [dump_line({**asdict(row), "wall_time": round(row.wall_time, 6)}) for row in rows]
    assert list(map(json.loads, encoded)) == list(map(json.loads, expected))


def test_values_are_read_back_as_they_were_whatever_they_are_an_exact_copy_of():
    in_float32 = array("f", [0.1, -2 / 3, 1e-30, 3e38]).tolist()
    for values in (in_float32, [*in_float32, 3.0], [*in_float32, 0.1], [0.5, 1e300]):
        names = tuple(f"{index}" for index in range(len(values)))
        (line,) = encode_rows(StepTable(0, names, [0], [0], [0.25], [values]))
        read = list(json.loads(line)["values"].values())
        assert read == values
        assert set(map(type, read)) == {float}


def test_epochs_are_kept_apart():
    table = EpochTable()
    for step, epoch in ((0, 0), (1, 0), (2, 1)):
        row = Row(step=step, epoch=epoch, batch_idx=step, wall_time=float(step), values={"m": float(step)})
        table.update(row.as_table())
    first, second = table.as_list()
    assert (first["first_step"], first["last_step"], first["num_steps"], first["seconds"]) == (0, 1, 2, 1.0)
    assert first["metrics"]["m"]["mean"] == 0.5
    assert second["metrics"]["m"]["count"] == 1


@given(st.lists(st.sampled_from(["table", "record", "logged", "ahead"]), max_size=12))
def test_tables_of_steps_become_the_rows_that_their_records_become(kinds):
    merger, other, step = RowMerger(), RowMerger(), 0
    found, expected = [], []
    for kind in kinds:
        if kind in ("logged", "ahead"):  # of the step before, or of one whose values come later
            record = logged(step - 1 if kind == "logged" else step + 1, x=float(step))
            found += [row.as_table() for row in merger.add(record)]
            expected += other.add(record)
            continue
        count = 3 if kind == "table" else 1
        records = [training(step + index, epoch=step // 5, loss=float(step + index)) for index in range(count)]
        step += count
        _, epochs, wall_times, batches, values = zip(*records, strict=True)
        steps = [record.step for record in records]
        rows = [list(of_step.values()) for of_step in values]
        table = StepTable(epochs[0], ("loss",), steps, list(batches), list(wall_times), rows)
        found += merger.add_table(table)
        expected += [row for record in records for row in other.add(record)]
    found += [row.as_table() for row in merger.close()]
    expected += other.close()
    assert list(joined(found)) == list(joined(row.as_table() for row in expected))
