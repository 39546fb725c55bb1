"""Two processes that log with sync_dist see stock Lightning's numbers, with one all-reduce for many of them."""

import json
import multiprocessing
import socket

import pytest
import torch

from tests.monitor.processes import CHECKS
from tests.parity.processes import COMPARED, PROCESSES, check


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["tests.parity.processes"])  # imported once for both
    torch.multiprocessing.start_processes(check, (port, folder), nprocs=PROCESSES, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [*COMPARED, "averaged"])
def test_all_that_is_left_equals_stock(found, name):
    assert [of_process[name] for of_process in found] == [[]] * PROCESSES


@pytest.mark.parametrize("name", CHECKS)
def test_what_one_process_sees_both_act_on_in_the_same_step(found, name):
    assert [of_process["watched"][name] for of_process in found] == [[]] * PROCESSES


def test_values_that_go_the_same_way_share_an_all_reduce_and_nothing_is_read(found):
    for of_process in found:
        calls = of_process["calls"]
        assert calls["steps"] == ["all_reduce"] * 2 * 2, "two steps: means with sums, and maxima; no barrier, no read"
        assert calls["validation"] == ["all_reduce"] * 2
        assert calls["epoch"] == ["all_reduce"] * 2


def test_the_order_of_the_calls_in_a_process_does_not_matter(found):
    for of_process in found:
        values = of_process["other order"]
        assert {values[name] for name in ("a", "a_step", "a_epoch")} == {float(ord("a"))}
        assert {values[name] for name in ("b", "b_step", "b_epoch")} == {float(ord("b"))}


def test_a_metric_of_one_process_is_refused_by_name(found):
    errors = [of_process["one logs"] for of_process in found]
    assert all("different numbers of values with sync_dist=True" in error for error in errors)
    assert "training_step.one" in errors[0]
    assert "training_step.one" not in errors[1]


def test_a_step_that_fails_leaves_the_values_of_the_step_before(found):
    for of_process in found:
        stock, ours = of_process["failed"]
        assert ours == stock
        assert "loss_step" in ours
