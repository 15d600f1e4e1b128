"""Build the course as a static site: python docs/build.py [--without-solutions] [SITE]

SITE is build/book by default. All pages are laid out in build/book-source, in the folders that they
have here, and Sphinx builds the site from them. No notebook is executed: the site shows the outputs
that they hold. Building it needs the packages in requirements.txt; laying it out needs none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def module(file: str) -> Any:
    """Return a module of a file: the kit itself is not installed where the site is built."""
    found = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


cells = module("ddp_kit/course/cells.py")
reference = module("docs/reference.py")

NOTEBOOKS = ROOT / "notebooks"
GUIDES = {  # and their titles in the contents
    "docs/teaching.md": "The teacher's guide",
    "docs/hints.md": "The hints of the checks",
    "docs/projects.md": "The projects: rubrics",
    "README.md": "About ddp_kit",
    "CONTRIBUTING.md": "Contributing",
    "CHANGELOG.md": "Changelog",
    "tests/benchmarks/README.md": "Benchmarks",
    "tests/benchmarks/GPU.md": "The lessons on a GPU",
    "tests/wrong_programs/README.md": "Wrong programs",
    "tests/cluster/README.md": "Hosts in one machine",
    "ddp_kit/lessons/data/digits/ORIGIN.md": "Where the digits are from",
}
PARTS = {  # folders of notebooks/, each with a page of its own
    "exercises": "Lines and whole functions to write, broken programs to repair, numbers to "
    "estimate and records to beat.\nA check runs your answer on real processes, and says what is "
    "wrong with it.",
    "projects": "A project takes days. It has a page and a program that runs.\nYou make it into a "
    "better one, milestone by milestone.",
    "solutions": "The cells of the exercises with the missing lines filled in, and why they are "
    "right. Try first.\nThe search leaves these pages out.",
}
SPOKEN = {  # what the theme writes, and what a screen reader or a keyboard can use
    '<summary><span class="toctree-toggle"': '<summary aria-label="Pages below">'
    '<span class="toctree-toggle"',
    'search-button-field search-button__button pst-js-only" title="Search" aria-label="Search"': (
        'search-button-field search-button__button pst-js-only" title="Search"'
    ),
    ' aria-label="Toggle hidden content"': "",  # the summary has words
    # On a narrow page it scrolls, also by keys.
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">': (
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block" tabindex="0">'
    ),
}
LINK = re.compile(r"\[([^][]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def lessons() -> list[Path]:
    """Return the notebooks of the lessons, in order, without a learner's own."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def part(name: str) -> list[Path]:
    """Return the notebooks of one of PARTS, in order."""
    number = "[0-9]" if name == "projects" else "[0-9][0-9]"
    return sorted((NOTEBOOKS / name).glob(f"{number}_*.ipynb"))


def relinked(text: str, old: Path, new: Path, parts: list[str]) -> str:
    """Return markdown that has moved from one path to another, with links that fit.

    A link to a folder leads to the folder's page, and one to a part that is left out is plain text.
    """

    def fit(link: re.Match[str]) -> str:
        words, path, anchor = link.groups()
        target = (old.parent / path).resolve()
        if target.is_dir():
            target /= "README.md" if (target / "README.md").exists() else "index.md"
        left_out = set(PARTS) - set(parts)
        if left_out.intersection(target.relative_to(ROOT).parts):
            return words
        return f"[{words}]({posixpath.relpath(target, new.parent)}{anchor or ''})"

    return LINK.sub(fit, text)


def page(path: Path, parts: list[str]) -> dict[str, Any]:
    """Return a notebook as the site shows it: answers folded, with its file."""
    notebook = json.loads(path.read_text("utf-8"))
    left_out = "exercise" if path.parent.name == "solutions" else "solution"
    notebook["cells"] = [cell for cell in notebook["cells"] if left_out not in cells.tags(cell)]
    for cell in notebook["cells"]:
        cell["source"] = cells.solved("".join(cell["source"]))
        if cell["cell_type"] == "markdown":
            if "answer" in cells.tags(cell):
                cell["source"] = cells.folded(cell["source"], "What the run shows")
            cell["source"] = relinked(cell["source"], path, path, parts)
        elif "answer" in cells.tags(cell):
            cell["metadata"]["tags"] = ["hide-output"]
        if "outputs" in cell:  # a live view leaves a display without data
            cell["outputs"] = [output for output in cell["outputs"] if output.get("data", True)]
    heading, _, rest = notebook["cells"][0]["source"].partition("\n")
    notebook["cells"][0]["source"] = (
        f'{heading}\n\n<p class="opens"><a href="{path.name}" download>Download '
        f"this notebook</a> · in JupyterLab: <code>{path.relative_to(NOTEBOOKS).as_posix()}</code>"
        f"</p>\n\n{rest}"
    )
    notebook["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
    if path.parent.name == "solutions":
        text = notebook["cells"][0]["source"]
        notebook["cells"][0]["source"] = text.replace("# Exercises:", "# Solutions:", 1)
        notebook["metadata"]["nosearch"] = True
    return notebook


def contents(pages: dict[str, str], *options: str) -> str:
    """Return a table of contents: pages, without their suffix, and their titles."""
    rows = [f"{title} <{name}>" for name, title in pages.items()]
    return "\n".join(["```{toctree}", *options, "", *rows, "```", ""])


def titles(paths: list[Path], folder: Path) -> dict[str, str]:
    """Return the pages of notebooks, relative to a folder, and their headings with numbers."""
    found = {}
    for path in paths:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        heading = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ").replace("`", "")
        name = path.relative_to(folder).with_suffix("").as_posix()
        if path.parent.name in PARTS:
            topic = heading.removeprefix("Exercises: ")
            heading = topic[0].upper() + topic[1:]
        found[name] = f"{path.stem.partition('_')[0]} {heading}"
    return found


def in_folder(name: str) -> list[str]:
    """Return the pages of docs/guide or docs/api, in the order of the first one."""
    first = f"docs/{name}/README.md"
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / first).read_text("utf-8"))
    return [first, *(f"docs/{name}/{page}" for page in dict.fromkeys(listed))]


def heading(name: str) -> str:
    """Return the first line of a page, without the marks of a heading and of code."""
    return (ROOT / name).read_text("utf-8").partition("\n")[0].removeprefix("# ").replace("`", "")


def index(parts: list[str]) -> str:
    """Return the first page: docs/index.md, the table of lessons, and the contents of the site."""
    own, readme = ROOT / "docs/index.md", (ROOT / "README.md").read_text("utf-8")
    table = re.search(r"^\| notebook \|.*?\n\n", readme, re.MULTILINE | re.DOTALL)
    assert table is not None, "README.md has the table of lessons"
    guide = {name.removesuffix(".md"): heading(name) for name in in_folder("guide")}
    api = {name.removesuffix(".md"): heading(name) for name in in_folder("api")}
    practice = {f"notebooks/{name}/index": name.capitalize() for name in parts}
    guides = {name.removesuffix(".md"): title for name, title in GUIDES.items()}
    return "\n".join(
        [
            relinked(own.read_text("utf-8"), own, ROOT / "index.md", parts),
            table[0],
            contents(titles(lessons(), ROOT), ":caption: Lessons", ":hidden:"),
            contents(practice, ":caption: Practise", ":hidden:"),
            contents(guide, ":caption: Guide", ":hidden:"),
            contents(api, ":caption: Reference", ":hidden:"),
            contents(guides, ":caption: More", ":hidden:"),
        ]
    )


def pages(parts: list[str]) -> dict[str, str]:
    """Return the text of all pages of the site, by their path."""
    found = {"index.md": index(parts)}
    for name in [*in_folder("guide"), *in_folder("api"), *GUIDES]:
        path = ROOT / name
        text = reference.expanded(path.read_text("utf-8"))
        found[name] = relinked(text, path, path, parts)
    for name in parts:
        rows = contents(titles(part(name), NOTEBOOKS / name), ":maxdepth: 2")
        found[f"notebooks/{name}/index.md"] = f"# {name.capitalize()}\n\n{PARTS[name]}\n\n{rows}"
    for path in notebooks(parts):
        found[path.relative_to(ROOT).as_posix()] = json.dumps(page(path, parts))
    return found


def notebooks(parts: list[str]) -> list[Path]:
    """Return all notebooks of the site."""
    return [*lessons(), *(path for name in parts for path in part(name))]


def linked_files(found: dict[str, str]) -> set[str]:
    """Return the files of the repository to which pages link and which are no pages."""
    targets = {
        posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        for name, text in found.items()
        for _, path, _ in LINK.findall(text)
    }
    return {target for target in targets - set(found) if (ROOT / target).is_file()}


def build(site: Path, parts: list[str]) -> int:
    """Build the site; return Sphinx's exit status, which is not 0 if there is a warning."""
    source = ROOT / "build" / "book-source"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
    found = pages(parts)
    for name, text in found.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, "utf-8")
    for name in linked_files(found):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    options = ["--conf-dir", ROOT / "docs", "--doctree-dir", ROOT / "build" / "book-cache"]
    options += ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "--jobs", "2"]
    status = subprocess.run([sys.executable, "-m", "sphinx", *options, source, site]).returncode
    if status == 0:
        for path in site.rglob("*.html"):
            text = path.read_text("utf-8")
            for old, new in SPOKEN.items():
                text = text.replace(old, new)
            path.write_text(text, "utf-8")
        for path in notebooks(parts):
            shutil.copyfile(path, site / path.relative_to(ROOT))
    return status


def main() -> int:
    """Build the site that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description="Build the course as a static site.")
    parser.add_argument("--without-solutions", action="store_true")
    parser.add_argument("site", nargs="?", type=Path, default=ROOT / "build" / "book")
    arguments = parser.parse_args()
    parts = [name for name in PARTS if name != "solutions" or not arguments.without_solutions]
    return build(arguments.site.resolve(), parts)


if __name__ == "__main__":
    sys.exit(main())
