"""What the README shows is what the kit does, and what CONTRIBUTING names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

import ddp_kit as kit
from ddp_kit.lessons import ring_allreduce

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")
PICTURE = ROOT / ".github" / "ring.png"


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf8")
    return re.search(rf"^{package}==([\w.]+)", lines, re.MULTILINE).group(1)


def test_the_example_prints_what_is_shown_below_it(tmp_path):
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    assert len([line for line in code.splitlines() if line]) <= 12
    script = tmp_path / "example.py"
    script.write_text(code)
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert (out.stdout, out.stderr) == (output, "")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("before", ["is a table of all calls", "## Is it still the same model?"])
def test_the_last_line_of_an_example_is_what_is_shown_below_it(capsys, before):
    section = README.split(before)[1]
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", section, re.DOTALL).groups()
    *lines, last = code.splitlines()
    imports = ["import torch", "import torch.distributed as dist", "import ddp_kit as kit"]
    exec("\n".join([*imports, *lines, f"print({last})"]), {"__name__": "__main__"})
    assert tuple(capsys.readouterr()) == (output, "")


@pytest.mark.skipif(
    matplotlib.__version__ != pinned("matplotlib"), reason="another matplotlib draws other pixels"
)
def test_the_picture_is_the_one_the_kit_draws():
    assert PICTURE.read_bytes() == kit.plot.ring(kit.run(ring_allreduce.watch))._repr_png_()


def test_the_moving_picture_moves_and_is_small():
    moving = ROOT / re.search(r"!\[.+\]\((.+\.gif)\)\n\n## Start", README)[1]
    assert moving.stat().st_size < 2e6
    assert Image.open(moving).n_frames > 5


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
