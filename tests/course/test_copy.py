"""The notebooks reach a learner: from a checkout, and from a wheel in a fresh environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from ddp_kit.course import editions
from ddp_kit.course.__main__ import main
from ddp_kit.course.copy import COPIED

ROOT = Path(__file__).resolve().parents[2]
BUILT = ["pyproject.toml", "README.md", "LICENSE"]  # what a wheel is built from, with the folders
LIMIT = 600  # seconds for one command
USE = """
import ddp_kit as kit

print(kit.__file__)
if __name__ == "__main__":
    print(list(kit.run(lambda rank, world_size: 10 * rank, world_size=2)))
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of three files, to be changed by a test."""
    course = tmp_path / "course"
    for file in ("00_start.ipynb", "exercises/01_send.ipynb", "solutions/01_send.ipynb"):
        (course / file).parent.mkdir(parents=True, exist_ok=True)
        write(course / file, f"first {file}")
    monkeypatch.setattr(editions, "_HANDOUT", course)
    return course


def write(path: Path, prose: str) -> None:
    nbformat.write(new_notebook(cells=[new_markdown_cell(prose, id="prose")]), path)


def contents(folder: Path) -> dict[str, str]:
    """Return the prose of the notebooks in a folder."""
    files = [path for path in folder.rglob("*.ipynb") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): nbformat.read(path, 4).cells[0].source
        for path in files
    }


def test_the_course_of_a_checkout_is_its_notebooks():
    assert editions.folder() == ROOT / "notebooks"
    tracked = subprocess.run(
        ["git", "ls-files", "notebooks"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    if tracked.returncode:
        pytest.skip("no git checkout")
    names = [f"notebooks/{file.as_posix()}" for file in editions.files()]
    assert sorted(names) == sorted(tracked.stdout.splitlines())


def test_a_copy_has_every_file_or_all_but_the_solutions(course, tmp_path, capsys):
    write(course / "mine.ipynb", "a learner's own")
    everything = {name: f"first {name}" for name in contents(course) if name != "mine.ipynb"}
    assert main(["copy", str(tmp_path / "all")]) == 0
    assert contents(tmp_path / "all") == everything
    assert main(["copy", "--no-solutions", str(tmp_path / "some")]) == 0
    assert contents(tmp_path / "some").keys() == {"00_start.ipynb", "exercises/01_send.ipynb"}
    assert f"3 files copied to {tmp_path / 'all'}, 0 updated, 0 kept." in capsys.readouterr().out


def test_a_changed_file_is_kept_and_an_old_one_updated(course, tmp_path, capsys):
    target = tmp_path / "mine"
    main(["copy", str(target)])
    write(target / "exercises/01_send.ipynb", "my answer")
    for file in ("00_start.ipynb", "exercises/01_send.ipynb"):
        write(course / file, f"second {file}")
    capsys.readouterr()
    assert main(["copy", str(target)]) == 0
    assert contents(target) == {
        "00_start.ipynb": "second 00_start.ipynb",
        "exercises/01_send.ipynb": "my answer",
        "solutions/01_send.ipynb": "first solutions/01_send.ipynb",
    }
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"0 files copied to {target}, 1 updated, 1 kept."
    assert "  exercises/01_send.ipynb" in others


@pytest.mark.parametrize("damaged", ["[]", "{"])
def test_a_file_that_this_command_did_not_copy_is_kept(course, tmp_path, damaged):
    target = tmp_path / "mine"
    target.mkdir()
    (target / COPIED).write_text(damaged)
    write(target / "00_start.ipynb", "my own lesson")
    assert main(["copy", str(target)]) == 0
    assert contents(target)["00_start.ipynb"] == "my own lesson"


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(course, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder, reason in [
        (tmp_path / "file", "cannot be copied to"),
        (tmp_path / "loop", "cannot be copied to"),
        (course / "inside", "is where the course itself is: name another folder"),
    ]:
        assert main(["copy", str(folder)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert reason in err
    assert (tmp_path / "file").read_text() == "mine"
    shutil.rmtree(course)
    assert main(["copy", str(tmp_path / "new")]) == 1
    assert "install it from its wheel" in capsys.readouterr().err


def test_a_wheel_in_a_fresh_environment_has_the_notebooks_and_none_of_a_learners(tmp_path):
    source, environment = tmp_path / "source", tmp_path / "environment"
    unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for folder in ("ddp_kit", "notebooks"):  # building writes files beside them
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=unwanted)
    for file in BUILT:
        shutil.copy(ROOT / file, source)
    (source / "notebooks" / "mine.ipynb").write_text("{}")
    (source / "notebooks" / "scripts" / "mine.py").write_text("")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]

    def run(*command) -> str:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(
            command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=LIMIT
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", *quiet, "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("ddp_kit-*.whl")
    assert wheel.stat().st_size < 8e6
    inside = "ddp_kit/course/handout/"
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(inside)]
    assert sorted(names) == sorted(inside + file.as_posix() for file in editions.files())

    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    run(*pip, "install", *quiet, "--no-compile", "--target", packages, wheel)
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib"))  # for torch
    target = tmp_path / "mine"
    run(python, "-m", "ddp_kit.course", "copy", target)
    assert 'outputs": []' in (target / "00_start_here.ipynb").read_text("utf-8")
    assert json.loads((target / COPIED).read_text()).keys() == {
        file.as_posix() for file in editions.files()
    }
    (tmp_path / "use.py").write_text(USE)
    where, result = run(python, "use.py").splitlines()
    assert Path(where).is_relative_to(packages)
    assert result == "[0, 10]"
