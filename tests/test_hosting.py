"""The files for Codespaces and JupyterHub name what exists, and agree with each other."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from test_setup import PROJECT, ROOT, TARGETS, run

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))


def test_the_files_ask_for_the_same_python():
    image = re.search(r"^FROM python:([\d.]+)-slim$", DOCKERFILE, re.MULTILINE)[1]
    assert image in ("3.10", "3.11", "3.12", "3.13", "3.14")
    assert CONTAINER["image"] == f"python:{image}"


def test_codespaces_runs_a_target_of_make():
    make, target = CONTAINER["postCreateCommand"].split()
    assert make == "make"
    assert target in TARGETS
    settings = CONTAINER["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"].endswith("/.venv/bin/python")
    assert [int(port) for port in CONTAINER["portsAttributes"]] == CONTAINER["forwardPorts"]


def test_the_image_copies_what_docker_sees_and_the_wheel_needs():
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
def test_a_container_starts_with_notebooks_unless_they_cannot_be_copied(tmp_path, blocked):
    if blocked:
        (tmp_path / "ddp_kit").write_text("a file")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = os.environ | {"HOME": str(tmp_path), "PATH": path}
    ran = run(ROOT / "docker" / "start", "echo", "two words", env=own)
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1] == "two words"
    assert (tmp_path / "ddp_kit" / "00_start_here.ipynb").exists() != blocked
    assert ("The notebooks were not copied." in ran.stderr) == blocked
