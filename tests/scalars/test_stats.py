"""Running statistics equal those of the whole series, at fixed addresses, without host reads."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zdtrain.errors import ConfigError
from zdtrain.stats import RunningStats, combine_losses, stack_metrics


def ema_of(series, decay):
    average = 0.0
    for value in series.tolist():
        average = decay * average + (1 - decay) * value
    return average / (1 - decay ** len(series))


def test_statistics_equal_those_of_the_series():
    series = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1000
    stats = RunningStats(ema_decay=0.9)
    for value in series.float():
        stats.update(value)
    assert stats.count.item() == 200
    assert stats.mean.item() == pytest.approx(series.mean().item(), rel=1e-6)
    assert stats.var.item() == pytest.approx(series.float().double().var().item(), rel=1e-3)
    assert stats.std.item() == pytest.approx(series.std().item(), rel=1e-3)
    assert stats.min.item() == series.float().min().item()
    assert stats.max.item() == series.float().max().item()
    assert stats.ema.item() == pytest.approx(ema_of(series, 0.9), rel=1e-6)


def test_low_precision_values_are_accumulated_in_float32():
    stats = RunningStats()
    for _ in range(300):
        stats.update(torch.tensor(1.0, dtype=torch.bfloat16))
    assert stats.count.item() == 300
    assert stats.mean.dtype is torch.float32
    assert stats.ema.item() == pytest.approx(1.0)


def test_update_reads_nothing_and_keeps_every_address(host_reads):
    stats = RunningStats()
    addresses = {name: buffer.data_ptr() for name, buffer in stats.named_buffers()}
    with host_reads as reads:
        for _ in range(3):
            stats.update(torch.tensor(1.0))
        stats.reset()
        stats.as_dict()
    assert reads.count == 0
    assert addresses == {name: buffer.data_ptr() for name, buffer in stats.named_buffers()}


def test_update_can_be_recorded_and_replayed():
    recorded, eager = RunningStats(), RunningStats()
    replay = make_fx(lambda x: recorded.update(x * 2))(torch.tensor(1.0))  # recording runs it once
    eager.update(torch.tensor(2.0))
    for value in (3.0, -1.0, 0.5):
        with torch.no_grad():
            replay(torch.tensor(value))
        eager.update(torch.tensor(value * 2))
    for name, buffer in eager.named_buffers():
        assert torch.equal(recorded.get_buffer(name), buffer), name


def test_reset_starts_anew():
    stats = RunningStats()
    stats.update(torch.tensor(5.0))
    stats.reset()
    stats.update(torch.tensor(1.0))
    assert {name: value.item() for name, value in stats.as_dict().items() if name != "var"} == pytest.approx(
        {"mean": 1.0, "min": 1.0, "max": 1.0, "count": 1, "ema": 1.0}
    )
    assert stats.var.isnan()


def test_statistics_survive_a_cast_and_a_checkpoint():
    stats = RunningStats()
    stats.update(torch.tensor(1.5))
    stats.half()
    other = RunningStats()
    other.load_state_dict(stats.state_dict())
    assert other.mean.dtype is torch.float32
    assert other.mean.item() == 1.5


def test_a_vector_metric_is_refused_with_its_shape():
    with pytest.raises(ConfigError, match=r"got shape \(3,\): reduce it"):
        RunningStats().update(torch.ones(3))


@pytest.mark.parametrize(
    ("options", "message"), [({"ema_decay": 1.0}, "ema_decay"), ({"dtype": torch.float16}, "dtype must be")]
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RunningStats(**options)


def test_stacking_keeps_order_and_gradients():
    loss = torch.tensor(2.0, requires_grad=True)
    stacked = stack_metrics({"loss": loss * 3, "accuracy": torch.tensor([0.5])})
    stacked[0].backward()
    assert stacked.tolist() == [6.0, 0.5]
    assert loss.grad.item() == 3.0
    assert stack_metrics([torch.tensor(1), torch.tensor(2)], dtype=torch.float32).dtype is torch.float32


def test_stacking_names_the_metric_that_is_not_a_number():
    with pytest.raises(ConfigError, match=r"accuracy must be one number, got shape \(2,\)"):
        stack_metrics({"loss": torch.tensor(1.0), "accuracy": torch.ones(2)})
    with pytest.raises(ConfigError, match="at least one metric"):
        stack_metrics([])


def test_combined_losses_are_weighted_by_scalars_in_place():
    weight = torch.tensor(0.5)
    parts = {"fit": torch.tensor(2.0, requires_grad=True), "penalty": torch.tensor(4.0, requires_grad=True)}
    total = combine_losses(parts, {"penalty": weight})
    total.backward()
    assert total.item() == 4.0
    assert parts["penalty"].grad.item() == 0.5
    weight.fill_(0.0)
    assert combine_losses(parts, {"penalty": weight}).item() == 2.0
    with pytest.raises(ConfigError, match="no loss called 'penalti'"):
        combine_losses(parts, {"penalti": 1.0})
