"""The set-up files agree with each other, and the Makefile does what the pages promise."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ddp_kit.machine_checks import OLDEST_PYTORCH

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, for which pytest installs tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def by_name(lines: list[str]) -> dict[str, Requirement]:
    """Parse requirement lines; the keys are normalized names."""
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(one.name): one for one in requirements}


def direct() -> dict[str, Requirement]:
    """Return the requirements of pyproject.toml, including those of the test extra."""
    return by_name(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def conda() -> tuple[dict[str, Requirement], list[str]]:
    """Return the conda packages and the lines of the pip section."""
    packages = [line for line in ENVIRONMENT["dependencies"] if isinstance(line, str)]
    (pip,) = (line["pip"] for line in ENVIRONMENT["dependencies"] if isinstance(line, dict))
    return by_name(packages), pip


def test_conda_mixes_channels_or_makes_another_environment():
    assert ENVIRONMENT["name"] == "ddp_kit"
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_conda_lacks_a_package_or_has_one_too_many():
    asked = {CONDA_NAMES.get(name, name) for name in by_name(PROJECT["dependencies"])}
    packages, pip = conda()
    assert set(packages) == asked | {"python", "pip"}
    assert pip == ["-e ."]


def test_conda_asks_for_other_versions():
    packages, _ = conda()
    assert (
        packages["python"].specifier == Requirement("python" + PROJECT["requires-python"]).specifier
    )
    for name, requirement in by_name(PROJECT["dependencies"]).items():
        assert packages[CONDA_NAMES.get(name, name)].specifier == requirement.specifier, name


def test_a_dependency_has_no_tested_version():
    assert set(direct()) <= {canonicalize_name(pin.name) for pin in constraints()}


def test_the_doctor_accepts_a_pytorch_that_pip_refuses():
    asked = by_name(PROJECT["dependencies"])["torch"].specifier
    assert asked == Requirement("torch>=" + ".".join(map(str, OLDEST_PYTORCH))).specifier


@pytest.mark.parametrize("pin", constraints(), ids=str)
def test_a_tested_version_is_not_exact_or_is_out_of_range(pin):
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    assert "*" not in specifier.version
    asked = direct().get(canonicalize_name(pin.name))
    assert asked is None or asked.specifier.contains(specifier.version)


@pytest.mark.parametrize("python", PYTHONS)
def test_two_tested_versions_of_one_package_apply_at_once(python):
    pins = [
        one
        for one in constraints()
        if one.marker is None or one.marker.evaluate({"python_version": python})
    ]
    names = [canonicalize_name(pin.name) for pin in pins]
    assert sorted(names) == sorted(set(names))
    assert {"torch", "torchvision"} <= set(names)


def own_environment() -> dict[str, str]:
    """Return the environment without what the `make` that runs these tests exports."""
    exported = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "ALL")
    return {name: value for name, value in os.environ.items() if name not in exported}


def targets() -> dict[str, str]:
    """Return the targets that `make help` lists, with their descriptions."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    return dict(re.findall(r"^([a-z]+):.*## (.+)$", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_a_page_promises_a_target_that_make_lacks(page):
    text = (ROOT / page).read_text("utf-8")
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`[^`\n]+`", text)
    promised = {name for code in blocks + spans for name in re.findall(r"\bmake ([a-z]+)", code)}
    assert promised
    assert promised <= set(targets())


def test_a_target_is_not_phony():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert set(phony.split()) == set(targets())


def test_ci_runs_something_other_than_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^(exec )?make test\b", script.read_text("utf-8"), re.MULTILINE)


def test_another_pytorch_changes_the_environment_of_the_pinned_one():
    options = ["TORCH=2.99.0", "PEERS=1", "ALL=1"]
    command = ["make", "--dry-run", "--always-make", "test", "bench", *options]
    out = subprocess.run(
        command, cwd=ROOT, env=own_environment(), capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
    assert "torch==2.99.0" in out.stdout
    environments = set(re.findall(r"\.venv(?:-torch-2\.99\.0)?[\w-]*", out.stdout))
    own = ".venv-torch-2.99.0"
    assert environments == {own, f"{own}-peers", f"{own}-graders"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["lab"], "The first time takes minutes."),
        (["lab"], "Opening JupyterLab on course/, which takes some seconds."),
        (["lesson", "NAME=ddp"], "Running the lesson ddp: 10 to 30 s"),
        (["test"], "about 10 minutes on two idle cores"),
        (["test", "ALL=1"], "about 30 minutes on two idle cores"),
    ],
)
def test_a_target_that_takes_long_begins_without_a_word(arguments, line):
    command = ["make", "--dry-run", "--always-make", *arguments]
    out = subprocess.run(
        command, cwd=ROOT, env=own_environment(), capture_output=True, text=True, timeout=600
    )
    assert line in out.stdout


def test_an_environment_is_committed_or_outlives_make_clean():
    ignored = (ROOT / ".gitignore").read_text("utf-8").split()
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (removed,) = re.findall(r"^clean:.*\n\t@rm -rf (.+)$", makefile, re.MULTILINE)
    for environment in (".venv", ".venv-peers", ".venv-graders", ".venv-torch-*"):
        assert f"{environment}/" in ignored
        assert environment in removed.split()


def test_a_clone_beside_a_script_hides_the_installed_package(tmp_path):
    (tmp_path / "ddp_kit").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text("import ddp_kit\nprint(callable(ddp_kit.run))\n")
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(script)]
    ran = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=600)
    assert ran.stdout == "True\n", ran.stderr


@pytest.mark.parametrize(
    ("name", "ignored"), [("mine.ipynb", True), ("04_ring_allreduce.ipynb", None)]
)
def test_a_notebook_of_the_learners_own_is_tested_or_one_of_the_course_is_not(name, ignored):
    found = runpy.run_path(str(ROOT / "conftest.py"))["pytest_ignore_collect"]
    assert found(ROOT / "notebooks" / name) is ignored


def test_a_test_run_in_the_background_ignores_interrupts(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's `&` has it
    try:
        conftest.pytest_sessionstart()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_failure_is_named_at_the_end_only(tmp_path):
    path = tmp_path / "test_two.py"
    path.write_text("def test_one():\n    assert 0\n\n\ndef test_two():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "-p", "conftest", str(path)]
    out = subprocess.run(
        [*command, "--rootdir", str(tmp_path)],
        cwd=ROOT,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    before, named, after = out.stdout.partition("::test_one failed\n")
    assert named, out.stdout + out.stderr
    assert before.splitlines()[-1].startswith("call of ")
    assert "::test_two PASSED" in after
