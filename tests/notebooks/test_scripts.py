"""The scripts that learners take home: each needs torch alone, and is what its lesson shows.

Lesson NN writes a script in a cell, `%%writefile scripts/NN_name.py`, and runs it in the next code
cell, `!"{sys.executable}" scripts/NN_name.py` or `!{torchrun} ...`. The script is also a file in
notebooks/scripts. It is run here as anybody would run it, on a copy, without the kit. nbval runs
it, too, with the lesson, so `make test` runs one of them here, and `make long` runs the others.

REQUIRED: the lessons that must have a script, by their number.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from kernels import learners_shell
from regenerate import FOLDER
from scripts import code_of, notebook_of, text_of, written
from test_audit import lesson, numbered, tags, text

SCRIPTS = sorted((FOLDER / "scripts").glob("[0-9][0-9]_*.py"))
# 08_ddp shows train_min.py, and 11_torchrun runs train.py.
REQUIRED = {path.name[:2] for path in FOLDER.glob("[0-9][0-9]_*.ipynb")} - {"08", "11"}
PROGRAMS = [FOLDER / "scripts" / name for name in ("train.py", "train_min.py")]
SHORT = "00_start_here"  # the one that `make test` runs without the kit
LIMIT = 300  # seconds for one run; one takes up to 20 s of CPU time
ALLOWED = {"torch", *sys.stdlib_module_names}
LAUNCHER = r"\{torchrun\} (--standalone --nproc-per-node \d+)"
RUN = re.compile(rf'^!(?:"\{{sys\.executable\}}"|{LAUNCHER}) scripts/(\w+\.py)(.*)$', re.MULTILINE)


def runs_of(notebook: dict, name: str) -> Iterator[tuple[list[str], str | None]]:
    """Yield the command of each run of a script, and what it printed; None if that may vary."""
    for _, cell in numbered(notebook, "code"):
        runs = [r for r in RUN.finditer("".join(cell["source"])) if r[2] == name]
        if runs:
            assert len(runs) == 1, "one run a cell, so that each has its own output"
            printed = "".join(text(output) for output in cell["outputs"]).replace("\r\n", "\n")
            options, _, arguments = runs[0].groups()
            launcher = f"-m torch.distributed.run {options} " if options else ""
            command = shlex.split(f"{launcher}scripts/{name}{arguments}")
            yield command, None if "nbval-ignore-output" in tags(cell) else printed


def run_next(notebook: dict, name: str, script: str) -> Iterator[str]:
    """Refuse a script that the code cell after the one that writes it does not run."""
    for cell, following in pairwise([*code_of(notebook), ""]):
        if written(cell, name) and name not in [run[2] for run in RUN.finditer(following)]:
            yield f"the code cell after the one that writes scripts/{name} does not run it"


def torch_alone(notebook: dict, name: str, script: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(script)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for found in {name.partition(".")[0] for name in names}:
            if found not in ALLOWED:
                yield f"scripts/{name} imports {found or 'a module beside it'}"


def guarded(notebook: dict, name: str, script: str) -> Iterator[str]:
    """Refuse a script that spawned processes would run again."""
    if 'if __name__ == "__main__":\n' not in script:
        yield f'scripts/{name} has no if __name__ == "__main__":'


RULES = [run_next, torch_alone, guarded]


def run(script: str, name: str, folder: Path, command: list[str]) -> str:
    """Run a copy of a script where the kit cannot be imported; return what it prints."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / name).write_text(script)
    blocked = folder / "blocked" / "ddp_kit"  # before the kit on the path, in spawned ranks as well
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('the kit is not here')\n")
    environment = learners_shell(PYTHONPATH=str(blocked.parent))
    if command[0] == "-m":  # torchrun warns if this is not set
        environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def with_one_short():
    for script in SCRIPTS:
        marks = [] if script.stem == SHORT else pytest.mark.long
        yield pytest.param(script, id=script.stem, marks=marks)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_keeps(rule, script):
    assert list(rule(notebook_of(script.name), script.name, text_of(script.name))) == []


@pytest.mark.parametrize("script", list(with_one_short()))
def test_script_prints_without_the_kit_what_its_lesson_shows(script, tmp_path):
    runs = list(runs_of(notebook_of(script.name), script.name))
    assert runs, "no cell runs it"
    for number, (command, printed) in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = run(text_of(script.name), script.name, folder, command)
        assert printed in (None, found)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.parametrize("rule", [torch_alone, guarded], ids=lambda rule: rule.__name__)
def test_a_training_program_keeps(rule, program):
    assert list(rule({}, program.name, program.read_text("utf-8"))) == []


def test_the_short_training_program_is_shown_whole():
    notebook = notebook_of("08_ddp")
    shown = [text(output) for _, cell in numbered(notebook, "code") for output in cell["outputs"]]
    assert any(
        (FOLDER / "scripts" / "train_min.py").read_text("utf-8") in printed for printed in shown
    )


def test_every_lesson_has_a_script():
    assert {script.name[:2] for script in SCRIPTS} >= REQUIRED


# From here on the rules themselves are tested.

NAME = "01_lesson.py"
SCRIPT = """\
import sys
import torch
import torch.multiprocessing as mp


def worker(rank):
    print(f"{rank + torch.ones(1).item():.0f} {sys.argv[1]}")


if __name__ == "__main__":
    mp.spawn(worker, nprocs=1)
"""


def with_script(script: str = SCRIPT) -> dict:
    notebook = lesson()
    notebook["cells"][3]["source"] = f"%%writefile scripts/{NAME}\n{script}"
    notebook["cells"][5]["source"] = f'!"{{sys.executable}}" scripts/{NAME} "a b"'
    notebook["cells"][5]["outputs"][0]["text"] = ["1 a b\r\n"]
    return notebook


def broken(notebook: dict, script: str = SCRIPT) -> list[str]:
    return [rule.__name__ for rule in RULES if list(rule(notebook, NAME, script))]


def test_a_run_is_read_from_the_notebook():
    command = [f"scripts/{NAME}", "a b"]
    assert list(runs_of(with_script(), NAME)) == [(command, "1 a b\n")]
    ignored = with_script()
    ignored["cells"][5]["metadata"] = {"tags": ["nbval-ignore-output"]}
    assert list(runs_of(ignored, NAME)) == [(command, None)]
    launched = with_script()
    options = "--standalone --nproc-per-node 2"
    launched["cells"][5]["source"] = f'!{{torchrun}} {options} scripts/{NAME} "a b"'
    command = ["-m", "torch.distributed.run", *options.split(), *command]
    assert list(runs_of(launched, NAME)) == [(command, "1 a b\n")]
    assert broken(launched) == []


def test_a_script_that_is_run_only_later_is_found():
    notebook = with_script()
    notebook["cells"][5], notebook["cells"][7] = notebook["cells"][7], notebook["cells"][5]
    assert broken(notebook) == ["run_next"]


def test_a_script_that_needs_more_than_torch_is_found():
    script = f"from . import other\n{SCRIPT}"
    assert broken(with_script(script), script) == ["torch_alone"]


def test_a_script_that_spawned_ranks_would_run_again_is_found():
    script = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    assert broken(with_script(script), script) == ["guarded"]


def test_the_kit_is_missing_in_a_script_and_in_the_ranks_that_it_spawns(tmp_path):
    tried = (
        "    try:\n        import ddp_kit\n"
        "    except ImportError as error:\n        print(error, flush=True)\n"
    )
    script = SCRIPT.replace("    mp.spawn", f"{tried}    mp.spawn")
    script = script.replace("    print(f", f"{tried}    print(f")
    command = [f"scripts/{NAME}", "a b"]
    assert run(script, NAME, tmp_path, command) == "the kit is not here\n" * 2 + "1 a b\n"


def test_a_script_that_fails_is_noticed(tmp_path):
    script = SCRIPT.replace("import torch\n", "import ddp_kit\n", 1)
    with pytest.raises(AssertionError, match="the kit is not here"):
        run(script, NAME, tmp_path, [f"scripts/{NAME}"])
