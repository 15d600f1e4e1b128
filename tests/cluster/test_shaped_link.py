"""all_reduce between two hosts takes the time that n, the bytes and the bandwidth predict."""

from __future__ import annotations

import pytest
from measure import MODELS, times

pytestmark = pytest.mark.usefixtures("forked_torchrun")

NBYTES = 2_500_000
BETA = 8 / 100e6  # seconds a byte at 100 Mbit/s; headers make it 5 % more


@pytest.fixture
def seconds(hosts, tmp_path):
    for host in hosts:
        host.shape("100mbit")
    found = times(hosts, tmp_path, per_host=2, rounds=2, sizes=[NBYTES])
    return {name: points[0][1] for name, points in found["rings"].items()}


def test_an_all_reduce_is_bound_by_the_link(seconds):
    for name, predicted in MODELS.items():
        expected = predicted(4, NBYTES, 0, BETA)
        assert expected < seconds[name] < 10 * expected, name  # README.md has the true figures
    assert seconds["chunked ring"] < seconds["whole ring"]
