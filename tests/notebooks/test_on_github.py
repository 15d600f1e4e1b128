"""What GitHub shows of each committed notebook: plain HTML, without style and without script.

GitHub runs no cell. It drops what it does not know from the HTML of an output or of prose, and
says nothing. The rules are as in test_audit.py: each yields what is wrong, and is broken below.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import mistune
import pytest
from PIL import Image
from regenerate import FOLDER, all_notebooks
from test_audit import display, lesson, numbered, outputs

NARROW = 100  # pixels; a picture as narrow as this shows nothing
# What is left of HTML on GitHub, as far as a lesson needs it.
TAGS = re.findall(
    r"\w+",
    "a abbr b blockquote br caption code dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img ins"
    " kbd li mark ol p pre s samp small span strong sub summary sup table tbody td tfoot th thead"
    " tr ul var",
)
ATTRIBUTES = re.findall(r"\w+", "align alt colspan height href open rowspan src title valign width")
PARSE = mistune.create_markdown(renderer="ast", plugins=["table"])
RULER = re.compile(r"\|(\s*:?-+:?\s*\|)+\s*")
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[`~]*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
MATH = re.compile(r"\$\$[^$]+\$\$|(?<![\\$\w])\$(?! )[^$\n]*[^$\s\\]\$(?![\w$])")


class Dropped(HTMLParser):
    """Collects what GitHub takes out of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in TAGS:
            self.found.append(f"<{tag}>")
        self.found += [f"{name}= of <{tag}>" for name, _ in attrs if name not in ATTRIBUTES]


def joined(source: str | list[str]) -> str:
    return "".join(source)


def tokens(cell: dict) -> Iterator[dict]:
    """Yield every token of a markdown cell, the outermost first."""
    waiting = PARSE(joined(cell["source"]))
    while waiting:
        token = waiting.pop(0)
        yield token
        waiting = token.get("children", []) + waiting


def prose(cell: dict) -> str:
    """The source of a markdown cell without its code."""
    return CODE.sub("", FENCE.sub("", joined(cell["source"])))


def pictures_are_whole(notebook: dict, folder: Path) -> Iterator[str]:
    for number, output in outputs(notebook):
        if "image/png" not in output.get("data", {}):
            continue
        try:
            data = base64.b64decode(joined(output["data"]["image/png"]))
            with Image.open(io.BytesIO(data)) as picture:
                picture.load()
        except (OSError, SyntaxError, binascii.Error) as error:  # SyntaxError: Pillow's broken PNG
            yield f"cell {number} shows a picture that cannot be read: {error}"
        else:
            if picture.width <= NARROW:
                yield f"cell {number} shows a picture {picture.width} pixels wide"


def text_beside_every_output(notebook: dict, folder: Path) -> Iterator[str]:
    for number, output in outputs(notebook):
        data = output.get("data")
        if data and "text/plain" not in data:
            yield f"cell {number} shows {', '.join(data)} and no text/plain"


def html_that_stays(notebook: dict, folder: Path) -> Iterator[str]:
    for number, output in outputs(notebook):
        for found in Dropped(joined(output.get("data", {}).get("text/html", ""))).found:
            yield f"GitHub drops {found} from the output of cell {number}"
    for number, cell in numbered(notebook, "markdown"):
        for token in tokens(cell):
            if token["type"] in ("block_html", "inline_html"):
                for found in Dropped(token["raw"]).found:
                    yield f"GitHub drops {found} from cell {number}"


def pictures_come_with_the_notebook(notebook: dict, folder: Path) -> Iterator[str]:
    for number, cell in numbered(notebook, "markdown"):
        for token in tokens(cell):
            if token["type"] == "image" and token["attrs"]["url"].startswith("https:"):
                yield f"cell {number} shows a picture from outside: {token['attrs']['url']}"


def formulas_that_github_sets(notebook: dict, folder: Path) -> Iterator[str]:
    for number, cell in numbered(notebook, "markdown"):
        left = MATH.sub("", prose(cell))
        for found in re.findall(r"\\[(\[]|\\begin\b|(?<!\\)\$", left):
            yield f"cell {number} has {found} outside of $...$ and $$...$$"


def tables_with_a_header(notebook: dict, folder: Path) -> Iterator[str]:
    for number, cell in numbered(notebook, "markdown"):
        source = FENCE.sub("", joined(cell["source"]))
        for found in re.finditer(r"(?:^[ ]{0,3}\|.*\n?)+", source, re.MULTILINE):
            rows = [row.strip() for row in found[0].splitlines()]
            before = source[: found.start()]
            widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            if len(rows) < 3 or not RULER.fullmatch(rows[1]):
                yield f"cell {number} has a table without a header: {rows[0]}"
            elif len(widths) > 1:
                yield f"cell {number} has a table whose rows differ in length: {rows[0]}"
            elif before and not before.endswith("\n\n"):
                yield f"cell {number} has a table without an empty line before it: {rows[0]}"


RULES: list[Callable[[dict, Path], Iterator[str]]] = [
    pictures_are_whole,
    text_beside_every_output,
    html_that_stays,
    pictures_come_with_the_notebook,
    formulas_that_github_sets,
    tables_with_a_header,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", all_notebooks(), ids=lambda path: path.stem)
def test_on_github_notebook_keeps(rule, path):
    assert list(rule(json.loads(path.read_text("utf-8")), path.parent)) == []


# From here on the rules themselves are tested.


def broken(notebook: dict) -> list[str]:
    return [rule.__name__ for rule in RULES if list(rule(notebook, FOLDER))]


def saying(source: str) -> dict:
    notebook = lesson()
    notebook["cells"][2]["source"] = source
    return notebook


def showing(data: dict) -> dict:
    notebook = lesson()
    notebook["cells"][1]["outputs"] = [display(data)]
    return notebook


def png(width: int) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (width, 10)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize(
    ("rule", "notebook"),
    [
        (pictures_are_whole, showing({"text/plain": "<Figure>", "image/png": png(300)[:60]})),
        (text_beside_every_output, showing({"text/html": "<p>1</p>"})),
        (html_that_stays, showing({"text/plain": "1", "text/html": "<script>1</script>"})),
        (pictures_come_with_the_notebook, saying("![ring](https://pytorch.org/ring.png)")),
        (formulas_that_github_sets, saying("it costs 5$")),
        (tables_with_a_header, saying("| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |")),
    ],
)
def test_a_notebook_that_breaks_a_rule_of_github_is_found(rule, notebook):
    assert broken(notebook) == [rule.__name__]
