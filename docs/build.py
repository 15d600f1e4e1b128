"""Build the course as a static site: python docs/build.py [SITE]    default: build/book

It lays out all pages in build/book-source, in the folders that they have here, and runs Sphinx on
them. The notebooks are not executed: the site shows the outputs that they hold.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
GUIDES = ("README.md", "docs/teaching.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")
DETAILS = (
    *(f"tests/{name}/README.md" for name in ("benchmarks", "cluster", "wrong_programs")),
    "ddp_kit/digits/ORIGIN.md",
)
PARTS = {  # of the course, by folder below notebooks/: the title, and what comes first on its page
    "exercises": (
        "Exercises",
        "Each exercise is a function with a gap of at most five lines. A check runs your function on real\n"
        "processes, and says what is wrong with it.",
    ),
    "solutions": (
        "Solutions",
        "The cells of the exercises with the missing lines filled in, and why they are right. Try first.\n"
        "The search leaves these pages out.",
    ),
}


def lessons() -> list[Path]:
    """Return the notebooks of the lessons, in order, without a learner's own."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def part(name: str) -> list[Path]:
    """Return the notebooks of one of PARTS, in order."""
    return sorted((NOTEBOOKS / name).glob("[0-9][0-9]_*.ipynb"))


def heading(path: Path) -> str:
    """Return the heading of a notebook, without markup."""
    first = "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"])
    return first.splitlines()[0].removeprefix("# ").replace("`", "")


def minutes() -> dict[str, str]:
    """Return the minutes of each lesson, by its name, from the table in README.md."""
    text = (ROOT / "README.md").read_text("utf-8")
    return dict(re.findall(r"^\| \[(\w+)\]\(notebooks/\w+\.ipynb\) \| (\d+) \|", text, re.MULTILINE))


def page(path: Path) -> dict[str, Any]:
    """Return a notebook as the site shows it: with its minutes and a link to its file."""
    notebook = json.loads(path.read_text("utf-8"))
    opening = notebook["cells"][0]
    heading, _, rest = "".join(opening["source"]).partition("\n")
    lasts = f"{minutes()[path.stem]} minutes · " if path in lessons() else ""
    file = path.relative_to(NOTEBOOKS).as_posix()
    opens = (
        f'<p class="opens">{lasts}<a href="{path.name}" download>Download this notebook</a>'
        f" · in JupyterLab: <code>{file}</code></p>"
    )
    opening["source"] = f"{heading}\n\n{opens}\n\n{rest}"
    for cell in notebook["cells"]:
        if "outputs" in cell:  # a live view leaves a display without data
            cell["outputs"] = [output for output in cell["outputs"] if output.get("data", True)]
    notebook["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
    if path.parent.name == "solutions":
        notebook["metadata"]["nosearch"] = True
    return notebook


def contents(title: str, paths: list[Path], folder: Path, depth: str = "") -> str:
    """Return a table of contents of notebooks, with their numbers, for a page in `folder`."""
    rows = [
        f"{path.stem[:2]} {heading(path)} <{path.relative_to(folder).with_suffix('').as_posix()}>"
        for path in paths
    ]
    return "\n".join([f"```{{toctree}}\n:caption: {title}", depth, *rows, "```", ""])


def index() -> str:
    """Return the first page: docs/index.md, the table of lessons, and the contents of the site."""
    readme = (ROOT / "README.md").read_text("utf-8")
    table = re.search(r"^\| notebook \|.*?\n\n", readme, re.MULTILINE | re.DOTALL)[0]
    more = [
        contents("Lessons", lessons(), ROOT, ":hidden:\n"),
        "```{toctree}\n:caption: Practise\n:hidden:\n",
        *[f"notebooks/{name}/index" for name in PARTS],
        "```\n",
        "```{toctree}\n:caption: About\n:hidden:\n",
        *[guide.removesuffix(".md") for guide in GUIDES],
        *[page.removesuffix(".md") for page in DETAILS],
        "```\n",
    ]
    return "\n".join([(ROOT / "docs/index.md").read_text("utf-8"), table, *more])


def with_pages(text: str, path: Path) -> str:
    """Return markdown whose links to folders lead to the page of the folder instead."""

    def whole(link: re.Match[str]) -> str:
        target = path.parent / link[1]
        if not target.is_dir():
            return link[0]
        name = "README.md" if (target / "README.md").exists() else "index.md"
        return f"]({posixpath.join(link[1], name)}"

    return LINK.sub(whole, text)


def lay_out(source: Path) -> None:
    """Write all pages, and the files to which they link, into the folder `source`."""
    written = {}
    for name in (*GUIDES, *DETAILS):
        written[name] = with_pages((ROOT / name).read_text("utf-8"), ROOT / name)
    written["index.md"] = index()
    for name, (title, text) in PARTS.items():
        rows = contents(title, part(name), NOTEBOOKS / name)
        written[f"notebooks/{name}/index.md"] = f"# {title}\n\n{text}\n\n{rows}"
    for path in [*lessons(), *(path for name in PARTS for path in part(name))]:
        notebook = page(path)
        written[path.relative_to(ROOT).as_posix()] = json.dumps(notebook)
    for name, text in written.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, "utf-8")
    for name in linked_files(written):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)


def linked_files(written: dict[str, str]) -> set[str]:
    """Return the files of the repository to which pages link and which are no pages."""
    targets = {
        posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        for name, text in written.items()
        for target in LINK.findall(text)
    }
    return {target for target in targets - set(written) if (ROOT / target).is_file()}


def main(site: Path) -> int:
    """Build the site; return Sphinx's exit status, which is not 0 after a warning."""
    source = ROOT / "build" / "book-source"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    lay_out(source)
    options = ["-b", "html", "-c", ROOT / "docs", "-W", "--keep-going", "-q", "-n", "-j", "2"]
    cache = ["-d", ROOT / "build" / "book-cache"]
    status = subprocess.run([sys.executable, "-m", "sphinx", *options, *cache, source, site])
    for path in [*lessons(), *(path for name in PARTS for path in part(name))]:
        if status.returncode == 0:
            shutil.copyfile(path, site / path.relative_to(ROOT))
    return status.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "book"))
