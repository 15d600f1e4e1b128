"""The files for Codespaces and JupyterHub name what exists, and agree with each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_setup import PROJECT, ROOT, targets

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
START = ROOT / "docker" / "start"


def test_the_files_ask_for_different_pythons():
    image = re.search(r"^FROM python:([\d.]+)-slim$", DOCKERFILE, re.MULTILINE)[1]
    assert image in ("3.10", "3.11", "3.12", "3.13", "3.14")
    assert CONTAINER["image"] == f"python:{image}"


def test_codespaces_runs_a_target_that_make_lacks():
    make, target = CONTAINER["postCreateCommand"].split()
    assert make == "make"
    assert target in targets()
    settings = CONTAINER["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"].endswith("/.venv/bin/python")
    assert [int(port) for port in CONTAINER["portsAttributes"]] == CONTAINER["forwardPorts"]


def test_the_image_copies_a_file_that_docker_does_not_see_or_that_the_wheel_lacks():
    seen = (ROOT / ".dockerignore").read_text("utf-8").split("\n")
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    for name in names:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in seen
    assert {PROJECT["readme"], *PROJECT["license-files"], "ddp_kit", "notebooks"} <= set(names)
    (entry,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', DOCKERFILE, re.MULTILINE)
    assert f"COPY --chmod=755 docker/start /usr/local/bin/{entry}\n" in DOCKERFILE


@pytest.mark.parametrize("blocked", [False, True])
def test_a_container_does_not_start_or_starts_without_notebooks(tmp_path, blocked):
    if blocked:
        (tmp_path / "ddp_kit").write_text("a file")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = os.environ | {"HOME": str(tmp_path), "PATH": path}
    ran = subprocess.run(
        [START, "echo", "two words"], env=own, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "two words"
    assert (tmp_path / "ddp_kit" / "00_start_here.ipynb").exists() != blocked
    assert ("The notebooks were not copied." in ran.stderr) == blocked
