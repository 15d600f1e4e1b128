"""The set-up files agree with each other, and the Makefile does what the pages promise."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddp_kit as kit
from ddp_kit.doctor_checks import OLDEST_PYTORCH

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, for which pytest installs tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
GUIDE = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/guide/*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


ASKED = {
    canonicalize_name(Requirement(line).name): Requirement(line) for line in PROJECT["dependencies"]
}
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z]+):.*## .+$", MAKEFILE, re.MULTILINE))  # of `make help`


def test_conda_asks_for_the_packages_and_versions_of_pyproject():
    *packages, pip = ENVIRONMENT["dependencies"]
    found = {one.name: one.specifier for one in map(Requirement, packages) if one.name != "pip"}
    asked = {**ASKED, "python": Requirement("python" + PROJECT["requires-python"])}
    assert found == {CONDA_NAMES.get(name, name): one.specifier for name, one in asked.items()}
    assert pip == {"pip": ["-e ."]}
    assert ENVIRONMENT["name"] == "ddp_kit"
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_the_doctor_refuses_the_pytorch_that_pip_refuses():
    oldest = Requirement("torch>=" + ".".join(map(str, OLDEST_PYTORCH)))
    assert ASKED["torch"].specifier == oldest.specifier


def test_each_dependency_has_a_tested_version_that_is_exact_and_in_range():
    tests = map(Requirement, PROJECT["optional-dependencies"]["test"])
    asked = {**ASKED, **{canonicalize_name(one.name): one for one in tests}}
    assert set(asked) <= {canonicalize_name(pin.name) for pin in PINS}
    for pin in PINS:
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert "*" not in specifier.version
        name = canonicalize_name(pin.name)
        assert name not in asked or asked[name].specifier.contains(specifier.version), pin


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_one_tested_version_of_each_package_applies(python):
    names = [
        canonicalize_name(one.name)
        for one in PINS
        if one.marker is None or one.marker.evaluate({"python_version": python})
    ]
    assert sorted(names) == sorted(set(names))
    assert {"torch", "torchvision"} <= set(names)


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess:
    """Run a command, without what the `make` that runs these tests exports."""
    exported = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "ALL")
    own = {name: value for name, value in os.environ.items() if name not in exported}
    options = {"env": own, "cwd": ROOT, **options}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


def test_each_file_that_names_the_version_names_the_same():
    version = kit.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{version}] - " in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"ddp_kit-{version}-" in (ROOT / "docs/guide/install.md").read_text("utf-8")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *GUIDE])
def test_make_has_each_target_that_a_page_promises(page):
    text = (ROOT / page).read_text("utf-8")
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`[^`\n]+`", text)
    promised = {name for code in blocks + spans for name in re.findall(r"\bmake ([a-z]+)", code)}
    assert promised <= TARGETS


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^(exec )?make test\b", script.read_text("utf-8"), re.MULTILINE)


def test_another_pytorch_has_environments_of_its_own():
    options = ["TORCH=2.99.0", "PEERS=1", "ALL=1"]
    out = run("make", "--dry-run", "--always-make", "test", "bench", *options)
    assert out.returncode == 0, out.stderr
    assert "torch==2.99.0" in out.stdout
    environments = set(re.findall(r"\.venv(?:-torch-2\.99\.0)?[\w-]*", out.stdout))
    own = ".venv-torch-2.99.0"
    assert environments == {own, f"{own}-peers", f"{own}-graders"}


def test_each_environment_is_ignored_and_removed_by_make_clean():
    ignored = (ROOT / ".gitignore").read_text("utf-8").split()
    (removed,) = re.findall(r"^clean:.*\n\t@rm -rf (.+)$", MAKEFILE, re.MULTILINE)
    for environment in (".venv", ".venv-peers", ".venv-graders", ".venv-torch-*"):
        assert f"{environment}/" in ignored
        assert environment in removed.split()


def test_a_clone_beside_a_script_does_not_hide_the_installed_package(tmp_path):
    (tmp_path / "ddp_kit").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import ddp_kit\nprint(callable(ddp_kit.run))\n")
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = run(sys.executable, script, env=outside)
    assert ran.stdout == "True\n", ran.stderr


@pytest.mark.parametrize(
    ("name", "ignored"), [("mine.ipynb", True), ("04_ring_allreduce.ipynb", None)]
)
def test_only_notebooks_of_the_course_are_tested(name, ignored):
    found = runpy.run_path(str(ROOT / "conftest.py"))["pytest_ignore_collect"]
    assert found(ROOT / "notebooks" / name) is ignored


def test_a_test_run_in_the_background_gets_interrupts(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's `&` has it
    try:
        conftest.pytest_sessionstart()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_failure_is_named_at_once(tmp_path):
    path = tmp_path / "test_two.py"
    path.write_text("def test_one():\n    assert 0\n\n\ndef test_two():\n    pass\n")
    options = ["-n", "0", "-v", "-p", "conftest", "--rootdir", tmp_path]
    out = run(sys.executable, "-m", "pytest", *options, path)
    before, named, after = out.stdout.partition("::test_one failed\n")
    assert named, out.stdout + out.stderr
    assert before.splitlines()[-1].startswith("call of ")
    assert "::test_two PASSED" in after
