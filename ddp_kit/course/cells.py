"""What a cell of a notebook is for: its tags, the gaps for the learner, and what is folded.

The site is built where the kit is not installed, so nothing of the kit is imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
GAP = re.compile(
    rf"^( *)# ([^\n]+)\n\1{BEGIN}\n((?:(?!{BEGIN}|{END}).)+)\n\1{END}$",
    re.MULTILINE | re.DOTALL,
)


def tags(cell: Mapping[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def may_fail(cell: Mapping[str, Any]) -> bool:
    """Return whether a cell shows an error on purpose."""
    return "raises-exception" in tags(cell)


def tasks(source: str) -> list[str]:
    """Return what is missing in each gap of a cell: "Exercise 4.1: exchange two chunks"."""
    return [match[2] for match in GAP.finditer(source)]


def hunted(source: str) -> str:
    """Return the number of the hunt whose program is in a cell, "9.1"; "" if there is none."""
    match = re.match(r"# Hunt (\d+\.\d+)\n", source)
    return match[1] if match else ""


def number_of(source: str) -> str:
    """Return the number of the exercise or hunt in a cell, "4.1"; "" if there is none."""
    gaps = (re.match(r"Exercise (\d+\.\w+)", task) for task in tasks(source))
    return hunted(source) or next((match[1] for match in gaps if match), "")


def unsolved(source: str) -> str:
    """Return a cell with gaps: `raise NotImplementedError`, or `name = ...` for a number."""

    def stub(gap: re.Match[str]) -> str:
        number = re.fullmatch(r"(\w+) = .+", gap[3])
        if number:
            return f"{number[1]} = ..."
        return f"{gap[1]}raise NotImplementedError({json.dumps(gap[2])})"

    return GAP.sub(stub, source)


def solved(source: str) -> str:
    """Return a cell with its solution, without the marks."""
    return GAP.sub(r"\3", source)


def folded(text: str, summary: str) -> str:
    """Return markdown, of which what stands above the first heading is shown on demand.

    A last paragraph there that ends with a colon or a question is not part of it: it introduces
    the next cell.
    """
    # A comment in a block of code is no heading.
    answer, heading, rest = re.fullmatch(
        r"((?:^```.*?^```$|.)*?)((?:^#+ |\Z))(.*)", text, re.S | re.M
    ).groups()
    answer = answer.strip()
    if answer.endswith((":", "?")) and "\n\n" in answer:
        answer, _, last = answer.rpartition("\n\n")
        rest = f"{last}\n\n{heading}{rest}"
    else:
        rest = heading + rest
    details = f"<details><summary>{summary}</summary>\n\n{answer}\n\n</details>"
    return f"{details}\n\n{rest}".rstrip()
