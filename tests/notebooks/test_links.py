"""The links in notebooks and in the guides: their form, and whether local ones lead somewhere.

Nothing is fetched. What can be known without a network is checked: files, headings, the names of
PyTorch in the addresses of its documentation, and the sections of the tutorial that the lessons
answer. The rules are as in test_audit.py: each yields what is wrong, and is broken below.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
import torch
from regenerate import FOLDER, all_notebooks
from test_on_github import prose, tokens
from torch.torch_version import TorchVersion

ROOT = FOLDER.parent
GUIDES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
GUIDES += [ROOT / "docs" / f"{name}.md" for name in ("teaching", "projects")]
GUIDES += [path for folder in ("guide", "api") for path in sorted(ROOT.glob(f"docs/{folder}/*.md"))]
PAGES = [*all_notebooks(), *GUIDES]
# Lessons may link to names that a PyTorch older than the pinned one lacks.
PINNED = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
OLD = TorchVersion(torch.__version__) < TorchVersion(PINNED[1])
DOCUMENTATION = "https://docs.pytorch.org/"
MOVED = re.compile(r"https://(www\.)?(pytorch\.org/(docs|tutorials)|arxiv\.org/pdf|dx\.doi\.org)\b")
TUTORIAL = "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html"
SECTIONS = {
    "setup",
    "point-to-point-communication",
    "collective-communication",
    "distributed-training",
    "our-own-ring-allreduce",
    "advanced-topics",
    "communication-backends",
    "initialization-methods",
}
API = f"{DOCUMENTATION}docs/stable/distributed.html"
TUTORIALS = f"{DOCUMENTATION}tutorials"
SOURCES = {  # what lessons follow, and say so in their first cells
    "00_start_here": f"{TUTORIAL}#setup",
    "01_point_to_point": f"{TUTORIAL}#point-to-point-communication",
    "02_collectives": f"{TUTORIAL}#collective-communication",
    "03_partitioned_sgd": f"{TUTORIAL}#distributed-training",
    "04_ring_allreduce": f"{TUTORIAL}#our-own-ring-allreduce",
    "05_your_machine": f"{API}#initialization",
    "06_init_methods": f"{TUTORIAL}#initialization-methods",
    "07_data_parallel": f"{DOCUMENTATION}docs/stable/generated/torch.nn.DataParallel.html",
    "08_ddp": f"{TUTORIAL}#distributed-training",
    "09_ddp_mistakes": f"{TUTORIAL}#distributed-training",
    "10_backends": f"{TUTORIAL}#communication-backends",
    "11_torchrun": f"{TUTORIALS}/intermediate/ddp_series_multinode.html",
    "14_device_mesh": f"{TUTORIALS}/recipes/distributed_device_mesh.html",
    "15_zero": "https://arxiv.org/abs/1910.02054",
    "16_tensor_parallel": "https://arxiv.org/abs/1909.08053",
    "17_pipeline_parallel": "https://arxiv.org/abs/1811.06965",
    "18_context_parallel": "https://arxiv.org/abs/2310.01889",
    "19_experts": "https://arxiv.org/abs/2006.16668",
    "20_which_one_when": "https://arxiv.org/abs/2104.04473",
    "21_your_own_backend": f"{TUTORIALS}/intermediate/process_group_cpp_extension_tutorial.html",
}
TRACKING = re.compile(r"utm_\w+|fbclid|gclid|ref|source")
SAYS_NOTHING = {"here", "link", "this", "this link", "this page", "click here"}
BARE = re.compile(r"(?<![(<\[\w\"'/])(?:https?://|www\.)\S+")


class Link(NamedTuple):
    """A link on a page; `cell` counts from 1 in a notebook and is 1 in a guide."""

    cell: int
    text: str
    url: str


class Page(NamedTuple):
    """A notebook or guide: its file, and its prose in the form of markdown cells."""

    path: Path
    cells: list[tuple[int, dict]]

    def links(self) -> Iterator[Link]:
        for number, cell in self.cells:
            for token in tokens(cell):
                if token["type"] == "link":
                    yield Link(number, plain(token), token["attrs"]["url"])


def plain(token: dict) -> str:
    """Return the text of a token without its markup."""
    inner = "".join(map(plain, token.get("children", ())))
    return " " if token["type"] == "softbreak" else token.get("raw", "") + inner


def read(path: Path) -> Page:
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return Page(path, [(1, {"source": text})])
    cells = enumerate(json.loads(text)["cells"], 1)
    return Page(path, [(number, cell) for number, cell in cells if cell["cell_type"] == "markdown"])


def anchors(page: Page) -> set[str]:
    """Return the anchors of a page's headings: GitHub's of a guide, JupyterLab's of a notebook."""
    titles = [
        plain(token)
        for _, cell in page.cells
        for token in tokens(cell)
        if token["type"] == "heading"
    ]
    if page.path.suffix == ".ipynb":
        return {title.replace(" ", "-") for title in titles}
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def outside(page: Page) -> Iterator[Link]:
    return (link for link in page.links() if urlsplit(link.url).scheme)


def well_formed(page: Page) -> Iterator[str]:
    for link in page.links():
        scheme, host, path, _, _ = urlsplit(link.url)
        if re.search(r"%20|[.,;:]$", link.url) or link.url.count("(") != link.url.count(")"):
            yield f"cell {link.cell} has a broken link: {link.url}"
        elif (scheme or host) and scheme != "https":
            yield f"cell {link.cell} has a link that is not https: {link.url}"
        elif scheme and (not re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", host) or "//" in path):
            yield f"cell {link.cell} has a link to no host: {link.url}"


def seen_in_jupyterlab(page: Page) -> Iterator[str]:
    """Refuse links that JupyterLab does not colour: it gives code the colour of plain text."""
    for number, cell in page.cells if page.path.suffix == ".ipynb" else ():
        for token in tokens(cell):
            if token["type"] == "link" and [t["type"] for t in token["children"]] == ["codespan"]:
                yield f"cell {number} has a link without a link's colour: [`{plain(token)}`]"


def straight(page: Page) -> Iterator[str]:
    """Refuse addresses that are known to redirect, that follow the reader, or that will change."""
    for link in outside(page):
        if MOVED.match(link.url):
            yield f"cell {link.cell} links to an address that has moved: {link.url}"
        for key, _ in parse_qsl(urlsplit(link.url).query):
            if TRACKING.fullmatch(key):
                yield f"cell {link.cell} has {key}= in a link: {link.url}"
        if re.match(rf"{DOCUMENTATION}docs/(?!stable/)", link.url):
            yield f"cell {link.cell} links to other documentation than the stable one: {link.url}"


def known_to_pytorch(page: Page) -> Iterator[str]:
    """Refuse documentation of names that PyTorch lacks, and sections that the tutorial lacks."""
    for link in outside(page):
        address, _, anchor = link.url.partition("#")
        if address == TUTORIAL and anchor and anchor not in SECTIONS:
            yield f"cell {link.cell} links to a section that the tutorial lacks: {anchor}"
        if address.startswith(f"{DOCUMENTATION}docs/"):
            generated = re.search(r"/generated/(torch\.[\w.]+)\.html$", address)
            names = [generated[1]] if generated else []
            names += [anchor] if anchor.startswith("torch.") else []
            for name in names:
                if not (OLD or exists(name)):
                    yield f"cell {link.cell} links to {name}, which PyTorch does not have"


def exists(name: str) -> bool:
    """Return whether a full name such as torch.distributed.send is one of PyTorch's."""
    found: Any = None
    parts = name.split(".")
    for count, part in enumerate(parts, 1):
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
        else:
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ImportError:
                return False
    return True


def local_links_lead_somewhere(page: Page) -> Iterator[str]:
    for link in page.links():
        scheme, host, path, _, anchor = urlsplit(link.url)
        if scheme or host:
            continue
        target = page.path.parent / unquote(path) if path else page.path
        if path.startswith("/") or not target.exists():
            yield f"cell {link.cell} leads to {path}, which is not there"
        elif anchor and unquote(anchor) not in anchors(page if not path else read(target)):
            yield f"cell {link.cell} leads to #{anchor}, which is no heading of {target.name}"


def named(page: Page) -> Iterator[str]:
    """Refuse addresses in the prose, and links whose text says nothing."""
    for number, cell in page.cells:
        for found in BARE.findall(prose(cell)):
            yield f"cell {number} shows an address: {found}"
    for link in page.links():
        address = link.url if urlsplit(link.url).scheme else None
        if link.text.strip().lower().rstrip(".") in {"", *SAYS_NOTHING} or link.text == address:
            yield f"cell {link.cell} has a link that does not say where it leads: {link.url}"


RULES: list[Callable[[Page], Iterator[str]]] = [
    well_formed,
    straight,
    known_to_pytorch,
    local_links_lead_somewhere,
    named,
    seen_in_jupyterlab,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_keeps(rule, path):
    assert list(rule(read(path))) == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_lesson_links_to_the_documentation_and_first_to_its_source(name):
    links = list(read(FOLDER / f"{name}.ipynb").links())
    pages = f"{API}#torch.distributed.", f"{DOCUMENTATION}docs/stable/generated/torch.nn.parallel."
    assert any(link.url.startswith(pages) for link in links)
    assert SOURCES[name] in [link.url for link in links if link.cell == 1]


# From here on the rules themselves are tested.


@pytest.fixture
def broken(tmp_path):
    """Return a function that names the rules which a text breaks, in a guide or a notebook."""
    (tmp_path / "other.md").write_text("# Other page\n\n## `%%ranks`, in short\n")
    heading = {"cell_type": "markdown", "source": ["# Other page\n", "\n", "## Two *ranks*"]}
    (tmp_path / "other.ipynb").write_text(json.dumps({"cells": [heading]}))

    def broken(text: str, suffix: str = ".md") -> list[str]:
        path = tmp_path / f"page{suffix}"
        cell = {"cell_type": "markdown", "source": text}
        path.write_text(text if suffix == ".md" else json.dumps({"cells": [cell]}))
        return [rule.__name__ for rule in RULES if list(rule(read(path)))]

    return broken


def test_a_link_that_jupyterlab_shows_as_code_is_found(broken):
    text = "[`dist.send`](https://docs.pytorch.org/)"
    assert broken(text) == []
    assert broken(text, ".ipynb") == ["seen_in_jupyterlab"]
    assert broken(f"{text[:-1]}#torch.distributed.send)".replace("`", ""), ".ipynb") == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[a](http://docs.pytorch.org/)", "well_formed"),
        ("[a](https://pytorch.org/docs/stable/distributed.html)", "straight"),
        (f"[a]({TUTORIAL}#ring)", "known_to_pytorch"),
        ("[a](other.ipynb#two-ranks)", "local_links_lead_somewhere"),
        ("see [here](https://docs.pytorch.org/)", "named"),
    ],
)
def test_a_broken_link_is_found(broken, text, rule):
    if OLD and rule == "known_to_pytorch" and TUTORIAL not in text:
        pytest.skip("a PyTorch older than the pinned one cannot tell")
    assert broken(text) == [rule]
    assert broken(text, ".ipynb") == [rule]
