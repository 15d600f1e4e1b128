"""The GPT of lessons 15 to 18 and 20, and the text that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ddp_kit as kit
from ddp_kit.lessons import _gpt

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, for which pytest installs tomli
    import tomli as tomllib

PACKAGE = Path(kit.__file__).parent


def test_the_loss_falls_in_a_few_steps():
    model = _gpt.make_gpt()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for batch in _gpt.batches(8, 30):
        optimizer.zero_grad()
        loss = _gpt.loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(128), abs=0.1)  # it knows nothing yet
    assert losses[-1] < 3.3


def test_batches_and_weights_are_the_same_each_time_and_leave_the_learners_seed_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = (list(_gpt.batches(4, 3, context=16)) for _ in range(2))
    weights = [torch.cat([p.flatten() for p in _gpt.make_gpt().parameters()]) for _ in range(2)]
    assert torch.equal(torch.rand(3), expected)
    kit.compare(first, second, rtol=0, atol=0).check()
    assert torch.equal(*weights)
    assert len(weights[0]) == 111_232  # as the docstring of Config says
    for inputs, targets in first:
        assert inputs.shape == targets.shape == (4, 16)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(first[0][0], first[1][0])
    parts = [_gpt.part_of(first[0], rank, 2)[0] for rank in range(2)]
    assert torch.equal(torch.cat(parts), first[0][0])


def test_a_position_does_not_see_later_ones_and_places_may_be_given():
    model = _gpt.make_gpt()
    ((tokens, _),) = _gpt.batches(2, 1)
    changed = tokens.clone()
    changed[:, 40:] = 0
    kit.compare(model(changed)[:, :40], model(tokens)[:, :40]).check()
    assert not kit.compare(model(changed)[:, 40:], model(tokens)[:, 40:])
    assert torch.equal(model(tokens, torch.arange(64)), model(tokens))
    assert not torch.equal(model(tokens, torch.arange(64).flip(0)), model(tokens))


def test_the_text_is_small_is_ascii_and_comes_with_the_package_and_its_origin():
    text = _gpt.TEXT.read_text("ascii")
    assert 50_000 < len(text) <= 100_000
    assert text.startswith("PRIDE AND PREJUDICE\n\nBy Jane Austen\n")
    assert "Jane\nAusten (1775-1817)" in _gpt.TEXT.with_name("ORIGIN.md").read_text("utf-8")
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["ddp_kit"]
    included = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    assert {_gpt.TEXT, _gpt.TEXT.with_name("ORIGIN.md")} <= included
