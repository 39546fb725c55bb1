"""``find_module=True``: the step that ended the run is run again, and the module that spoiled it is named."""

import re

import pytest
import torch
from torch import nn

from zdtrain.monitors import NonFinite
from zdtrain.records import load_run

from .runs import Net, differences, left_behind, loader, run


class Root(nn.Module):
    def forward(self, x):
        return (x - 10).sqrt()


class Broken(Net):
    """Takes the root of a negative number in one step."""

    def __init__(self):
        super().__init__("AdamW")
        self.part = nn.Sequential(nn.Identity(), Root())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.0 * self.part(batch[2] * 0 + (0.0 if batch_idx == 17 else 20.0)).mean()


CASES = {
    "module": (Broken, {}, r"the output of part.1 \(Root\) is not finite; its inputs are finite"),
    "batch": (lambda: Net("AdamW"), {17: "nan"}, "the batch itself holds values that are not finite"),
    "gradient": (lambda: Net("AdamW"), {17: "nan gradient"}, r"the gradient of net.0.weight is not \(1 of 6 param"),
}


@pytest.mark.parametrize("lag", [None, 10_000])
@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_named_and_looking_for_it_changes_nothing(case, lag, tmp_path, caplog):
    make, bad, message = CASES[case]
    monitor = NonFinite(then="stop", find_module=True)
    options = {"lag": lag, "max_lag_steps": 20, "records": tmp_path}
    with caplog.at_level("INFO"):
        stopped = run(make(), loader(60, bad), monitors=[monitor], **options)
    plain = run(make(), loader(60, bad), monitors=[NonFinite(then="stop")], **options)
    (event,) = [event for event in load_run(stopped.recorder.folder).events if event["kind"] == "monitor-cause"]
    assert event["step"] == stopped.global_step == 17
    assert torch.is_grad_enabled()
    assert re.search(message, event["message"]), event["message"]
    assert differences(left_behind(stopped), left_behind(plain)) == []
