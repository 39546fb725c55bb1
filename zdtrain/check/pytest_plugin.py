"""Fixtures for pytest: put ``pytest_plugins = ["zdtrain.check.pytest_plugin"]`` into the top-level ``conftest.py``."""

from collections.abc import Callable, Iterator

import pytest

from zdtrain.check.api import assert_capturable, assert_no_host_reads
from zdtrain.check.report import CheckReport
from zdtrain.check.shadow import ShadowDevice

__all__ = ["capturable", "no_host_reads", "shadow_device"]


@pytest.fixture
def no_host_reads() -> Callable[..., CheckReport]:
    """The function `zdtrain.check.assert_no_host_reads`."""
    return assert_no_host_reads


@pytest.fixture
def capturable() -> Callable[..., CheckReport]:
    """The function `zdtrain.check.assert_capturable`."""
    return assert_capturable


@pytest.fixture
def shadow_device() -> Iterator[ShadowDevice]:
    """A shadow device that is on during the test, so that code that asks for ``cuda`` runs its CUDA branch."""
    with ShadowDevice() as device:
        yield device
