import pytest

import zdtrain.trainer

from .host_graph import GraphRuntime


@pytest.fixture
def device_graphs(monkeypatch):
    """A stand-in for a device with graphs."""
    monkeypatch.setattr(zdtrain.trainer, "runtime_for", lambda device: GraphRuntime())
