"""Tests across two hosts are skipped, with the reason, where there can be none."""

from __future__ import annotations

import hosts as module
import pytest


@pytest.fixture(scope="session")
def _allowed() -> None:
    reason = module.missing()
    if reason:
        pytest.skip(reason)
    module.sweep()


@pytest.fixture
def hosts(_allowed):
    """Two hosts of the test's own."""
    with module.two_hosts() as made:
        yield made
