"""What the README shows is what the kit does, and what CONTRIBUTING names exists."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from kernels import FORKED, Cell, Kernel

import ddp_kit as kit
from ddp_kit.lessons import ring_allreduce

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
PICTURE = ROOT / ".github" / "ring.png"
PAGES = [ROOT / "README.md", ROOT / "docs/index.md"]
PAGES += [path for folder in ("guide", "api") for path in sorted(ROOT.glob(f"docs/{folder}/*.md"))]
# A block of Python is a cell of the page's notebook; a block without a language right below it is
# what the cell shows. What cannot run here is marked as py.
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def with_examples() -> list[Path]:
    return [page for page in PAGES if EXAMPLE.search(page.read_text("utf-8"))]


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf8")
    return re.search(rf"^{package}==([\w.]+)", lines, re.MULTILINE).group(1)


def test_the_example_prints_what_is_shown_below_it(tmp_path):
    code, output = EXAMPLE.search(README).groups()
    assert len([line for line in code.splitlines() if line]) <= 12
    script = tmp_path / "example.py"
    script.write_text(code)
    given = {"env": os.environ | FORKED, "capture_output": True, "text": True, "timeout": 600}
    out = subprocess.run([sys.executable, script], **given)
    assert (out.stdout, out.stderr) == (output, "")


def shown_by(cell: Cell) -> str:
    """Return what a cell shows as text."""
    text = cell.stdout
    text += "".join(c["data"]["text/plain"] + "\n" for c in cell.contents("execute_result"))
    return without_numbers(text + (cell.rendered if cell.error else ""))


def without_numbers(text: str) -> str:
    return re.sub(r"In\[\d+\]", "In[]", text).rstrip()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    own = Kernel(tmp_path_factory.mktemp("notebook"), **FORKED)
    yield own
    own.end()


@pytest.mark.parametrize(
    "page", with_examples(), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_each_example_of_a_page_shows_what_stands_below_it(page, notebook):
    notebook.run("get_ipython().reset(); get_ipython().extension_manager.loaded.clear()")
    notebook.run(notebook.set_up)
    try:
        for code, shown in EXAMPLE.findall(page.read_text("utf-8")):
            cell = notebook.send(code).finish()
            assert shown_by(cell) == without_numbers(shown), code
    finally:
        notebook.run("%load_ext ddp_kit\n%ranks reset\nkit.shutdown()")


@pytest.mark.skipif(
    matplotlib.__version__ != pinned("matplotlib"), reason="another matplotlib draws other pixels"
)
def test_the_picture_is_the_one_the_kit_draws():
    assert PICTURE.read_bytes() == kit.plot.ring(kit.run(ring_allreduce.watch))._repr_png_()


def test_the_guide_lists_its_pages():
    for folder in ("guide", "api"):
        listed = re.findall(
            r"\]\((\w+\.md)\)", (ROOT / f"docs/{folder}/README.md").read_text("utf-8")
        )
        found = {path.name for path in ROOT.glob(f"docs/{folder}/*.md")}
        assert set(listed) == found - {"README.md"}


def said() -> str:
    """Return all texts of the kit and of its Makefile, with … for each value in them."""
    texts = [(ROOT / "Makefile").read_text("utf-8").replace('" \\\n' + " " * 12 + '"', " ")]
    for file in ROOT.glob("ddp_kit/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_each_message_that_troubleshooting_explains_exists():
    page = (ROOT / "docs/guide/troubleshooting.md").read_text("utf-8")
    messages = re.findall(
        r"^\| `([^`]+)` \|", page.partition("## In the notebook")[0], re.MULTILINE
    )
    errors = {f"{name}:" for name in kit.__all__ if name.endswith("Error")}
    parts = {part.strip() for message in messages for part in message.split("…")} - errors
    assert len(messages) > 30
    text = said()
    assert not {part for part in parts if part not in text}


COMMANDS = (ROOT / "docs/api/commands.md").read_text("utf-8")


@pytest.mark.parametrize("command", re.findall(r"^## `python -m (.+)`$", COMMANDS, re.MULTILINE))
def test_the_reference_shows_the_help_of_a_command(command, capsys, monkeypatch):
    shown = re.search(
        rf"^## `python -m {command}`$.*?```\n(.*?)```", COMMANDS, re.MULTILINE | re.DOTALL
    )
    module, *words = command.split()
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out.split() == shown[1].split()


def test_the_reference_has_each_command_and_option_that_a_page_shows():
    known = set(re.findall(r"ddp_kit\.[\w.]+|--[\w-]+|\bcourse [a-z]+", COMMANDS))
    for page in PAGES:
        for command in re.findall(r"python -m (ddp_kit\.[^`\n]*)", page.read_text("utf-8")):
            words = re.findall(r"ddp_kit\.[\w.]+|--[\w-]+|\bcourse [a-z]+", command)
            assert set(words) <= known, (page.name, command)


def test_every_notebook_is_in_the_table_and_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    lessons = ROOT.glob("notebooks/[0-9][0-9]_*.ipynb")
    assert {str(path.relative_to(ROOT)) for path in lessons} <= set(links)
    for link in links:
        assert (ROOT / link).exists(), link


def test_each_file_and_folder_that_contributing_names_exists():
    paths = re.findall(r"[\w./]+\.py\b|`(?:ddp_kit|pool|notebooks|tests)/[\w/]*`", CONTRIBUTING)
    named = {path.strip("`") for path in paths if "NAME" not in path}
    assert len(named) > 20
    assert not {n for n in named if not any((top / n).exists() for top in (ROOT, ROOT / "ddp_kit"))}


def test_the_map_of_contributing_has_each_folder_and_module():
    package = ROOT / "ddp_kit"
    folders = {f"`ddp_kit/{file.parent.name}/`" for file in package.glob("*/__init__.py")}
    modules = {f"`ddp_kit/{file.name}`" for file in package.glob("[!_]*.py")}
    assert not {name for name in folders | modules if name not in CONTRIBUTING}
