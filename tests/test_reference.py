"""The reference in docs/api: each public name is in it, with the signature that it has."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from types import ModuleType

import pytest
from test_book import ROOT, build

import ddp_kit as kit

API = {path.name: path.read_text("utf-8") for path in ROOT.glob("docs/api/*.md")}
LISTED = [
    name
    for page in API.values()
    for block in build.reference.BLOCK.findall(page)
    for name in block.split()
]
PUBLIC = {
    f"{package.__name__}.{name}"
    for package in (kit, kit.plot, kit.model)
    for name in package.__all__
    if not isinstance(getattr(package, name), ModuleType)
}
UNSHOWN = {name for name in kit.__all__ if name.endswith("Error")} | {
    *("Result", "Comparison", "RankFailure"),  # a function returns them, or an error has them
    *("Picture", "Plans", "Estimate", "Round", "Precision", "Accelerator", "Cluster"),
    "doctor",  # prints what this machine has
}
SOURCES = "\n".join(path.read_text("utf-8") for path in ROOT.glob("ddp_kit/**/*.py"))


def imported(name: str) -> object:
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def test_each_public_name_has_one_entry():
    assert PUBLIC - set(LISTED) == set()
    assert len(LISTED) == len(set(LISTED))


@pytest.mark.parametrize("name", LISTED)
def test_an_entry_has_the_signature_that_the_name_has(name):
    found, node = imported(name), build.reference.find(name)
    if isinstance(node, ast.Assign) or name.endswith("Error"):
        return
    signature = build.reference.signature(node)
    assert "settings." not in signature, "a default is shown as its value"
    read = ast.parse(f"def f{signature}: ...").body[0].args
    read = [*read.posonlyargs, *read.args, read.vararg, *read.kwonlyargs, read.kwarg]
    assert [one.arg for one in read if one] == list(inspect.signature(found).parameters)
    assert inspect.getdoc(found)


def test_each_public_name_that_can_be_called_is_in_an_example():
    pages = [*API.values(), *(path.read_text("utf-8") for path in ROOT.glob("docs/guide/*.md"))]
    examples = "\n".join(
        code
        for page in pages
        for code in re.findall(r"```(?:python|py)\n(.*?)```", page, re.DOTALL)
    )
    called = {name.rpartition(".")[2] for name in PUBLIC if callable(imported(name))}
    assert not {name for name in called if not re.search(rf"\b{name}\b", examples)} - UNSHOWN


def test_each_environment_variable_is_in_the_table():
    read = set(re.findall(r"DDP_KIT_[A-Z_]+", SOURCES))
    assert read == set(re.findall(r"`(DDP_KIT_[A-Z_]+)`", API["environment.md"]))


def test_each_option_of_ranks_is_in_the_table():
    magics = (ROOT / "ddp_kit/notebook/magics.py").read_text("utf-8")
    options = set(re.findall(r'"(--?[a-z-]+)",', magics))
    assert len(options) > 3
    assert not {option for option in options if f"`{option} " not in API["magics.md"]}
