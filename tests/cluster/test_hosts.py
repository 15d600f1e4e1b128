"""The hosts of the other tests: two test runs never see each other, and none leaves anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
from hosts import sweep
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


def test_the_hosts_of_a_killed_run_are_swept_and_those_of_a_living_one_are_not(hosts):
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
