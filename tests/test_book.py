"""The book: its pages are all there, each picture is described, and each link leads somewhere.

What the pages are made of is checked here without Sphinx. The long test builds the site.
"""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parent / "notebooks"))

from regenerate import all_notebooks

ROOT = Path(__file__).resolve().parents[1]
SPECIFICATION = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")
build = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(build)
ALL = list(build.PARTS)
GRADED = [part for part in ALL if part != "solutions"]


@cache
def pages(*parts: str) -> dict[str, str]:
    return build.pages(list(parts))


def markdown(name: str, text: str) -> str:
    """Return the prose of a page, of a notebook's as well."""
    if not name.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.mark.parametrize("parts", [ALL, GRADED], ids=["all", "without solutions"])
def test_each_notebook_is_a_page_and_in_the_contents(parts):
    found = pages(*parts)
    committed = {path.relative_to(ROOT).as_posix() for path in all_notebooks()}
    wanted = {name for name in committed if "solutions" in parts or "/solutions/" not in name}
    assert {name for name in found if name.endswith(".ipynb")} == wanted
    listed = [
        posixpath.normpath(posixpath.join(posixpath.dirname(name), page))
        for name, text in found.items()
        for block in re.findall(r"```\{toctree\}(.*?)```", text, re.DOTALL)
        for page in re.findall(r"<(.+)>$", block, re.MULTILINE)
    ]
    assert sorted(listed) == sorted(
        posixpath.splitext(name)[0] for name in found if name != "index.md"
    )


@pytest.mark.parametrize("parts", [ALL, GRADED], ids=["all", "without solutions"])
def test_each_link_leads_to_a_page_or_a_file(parts):
    found = pages(*parts)
    known = set(found) | build.linked_files(found)
    links = [
        posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(path)))
        for name, text in found.items()
        for _, path, _ in build.LINK.findall(markdown(name, text))
    ]
    assert len(links) > 100
    assert set(links) - known == set()


def test_a_page_offers_its_notebook():
    for path in build.notebooks(ALL):
        opening = build.page(path, ALL)["cells"][0]["source"]
        assert f'<p class="opens"><a href="{path.name}" download>' in opening


def test_each_picture_comes_with_words():
    pictures = 0
    for path in build.notebooks(ALL):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    pictures += 1
                    words = "".join(output["data"].get("text/plain", ""))
                    assert len(words) > 20, f"{path.name}: {cell['id']}"
    assert pictures > 100


def test_the_search_finds_no_solution():
    for path in build.part("solutions"):
        assert build.page(path, ALL)["metadata"]["nosearch"] is True
    assert "nosearch" not in build.page(build.lessons()[0], ALL)["metadata"]


def test_the_site_is_built_with_exact_versions():
    lines = (ROOT / "docs" / "requirements.txt").read_text("utf-8").splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            (specifier,) = Requirement(line).specifier
            assert specifier.operator == "==", line


def test_publishing_builds_the_book_without_a_secret():
    text = (ROOT / ".github" / "workflows" / "book.yml").read_text("utf-8")
    assert "secrets." not in text
    (job,) = yaml.safe_load(text)["jobs"].values()
    assert {"run": "make book"} in job["steps"]
    assert {"path": "build/book"} in [step.get("with") for step in job["steps"]]


class Page(HTMLParser):
    """What a built page has: names of places in it, links, what it loads, and pictures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.pictures: list[str | None] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.places |= {value for value in (found.get("id"), found.get("name")) if value}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(found["href"])
        if tag in ("script", "img") and found.get("src"):
            self.loaded.append(found["src"])
        if tag == "img":
            self.pictures.append(found.get("alt"))


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Sphinx needs Python 3.11")
@pytest.mark.parametrize("solutions", ["yes", "no"])
def test_the_site_is_built_without_a_warning_and_each_of_its_links_leads_somewhere(solutions):
    own = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", "book", f"SOLUTIONS={solutions}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    site = ROOT / "build" / "book"
    found = [path for path in site.rglob("*.html") if "_static" not in path.parts]  # no templates
    built = {path: Page(path) for path in found}
    names = {path.relative_to(site).as_posix() for path in built}
    wanted = {
        posixpath.splitext(name)[0] for name in pages(*(ALL if solutions == "yes" else GRADED))
    }
    assert {f"{name}.html" for name in wanted} <= names
    assert ("notebooks/solutions/04_ring_allreduce.html" in names) == (solutions == "yes")
    broken = []
    for path, page in built.items():
        assert all(page.pictures), f"a picture in {path} has no words"
        for address in page.links + page.loaded:
            scheme, host, target, _, place = urlsplit(address)
            if scheme or host:
                assert address in page.links, f"{path} loads {address}"
                continue
            leads_to = (path.parent / unquote(target)).resolve() if target else path
            leads_to = leads_to / "index.html" if leads_to.is_dir() else leads_to
            places = built[leads_to].places if leads_to in built else {place}
            if not leads_to.exists() or (place and unquote(place) not in places):
                broken.append((path.name, address))
    assert broken == []
    words = (site / "searchindex.js").read_text("utf-8")
    assert "notebooks/04_ring_allreduce" in words
    formulas = (site / "notebooks" / "04_ring_allreduce.html").read_text("utf-8")
    assert "<mfrac>" in formulas
