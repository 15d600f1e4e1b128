"""The hosts of the other tests: two test runs never see each other, and none leaves anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts import sweep, two_hosts
from processes import assert_gone

LEFT = """
import subprocess, time
from hosts import two_hosts
with two_hosts() as (host, _):
    print(subprocess.Popen(host.command("sleep", "100")).pid, flush=True)
    time.sleep(100)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_a_killed_run_leaves_its_hosts_forever(hosts):
    folder = Path(__file__).parent
    command = [sys.executable, "-c", LEFT]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as run:
        sleeping = psutil.Process(int(run.stdout.readline()))
        run.kill()
    assert f"ddp_kit-{run.pid}-" in namespaces()
    sweep()
    assert f"ddp_kit-{run.pid}-" not in namespaces()
    assert_gone([sleeping], "the sweep")
    assert all(host.name in namespaces() for host in hosts)  # this run is alive


@pytest.mark.usefixtures("_allowed")
def test_a_host_outlives_an_interrupt():
    names = []
    try:
        with two_hosts() as made:
            names += [host.name for host in made]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not any(name in namespaces() for name in names)
