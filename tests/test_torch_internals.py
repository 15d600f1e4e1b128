"""Without an undocumented name of PyTorch, a feature is off, and a line says what is lost."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from ddp_kit import torch_internals
from ddp_kit.torch_internals import Feature
from ddp_kit.trace.collectives import method_of

GROUP, DEFAULT = "torch.distributed:group.WORLD", "torch:get_default_dtype"


@pytest.fixture
def feature(monkeypatch):
    monkeypatch.setattr(Feature, "all", [])
    return Feature


def test_this_pytorch_has_all_names():
    assert torch_internals.notices() == []


def test_a_feature_without_one_of_its_names_is_off_and_one_line_says_what_is_lost(feature):
    assert feature("nothing is lost", GROUP, DEFAULT).is_on
    lost = feature("it is lost", DEFAULT, "torch:_renamed.one", "torch._moved:two")
    assert not lost.is_on
    assert list(lost.found) == ["get_default_dtype"]
    assert torch_internals.notices() == [
        "this PyTorch has no torch._renamed and no torch._moved: it is lost"
    ]


def test_one_of_several_names_of_releases_is_enough(feature):
    assert feature("", DEFAULT, "torch:_renamed", any_of=True).is_on
    assert not feature("", "torch:_renamed", any_of=True).is_on
    assert method_of("all_gather_into_tensor") == "all_gather_single"


def test_groups_that_cannot_be_counted_count_as_changed(monkeypatch):
    assert torch_internals.count_groups() == torch_internals.count_groups()
    monkeypatch.setattr(torch_internals.GROUP_COUNT, "is_on", False)
    assert torch_internals.count_groups() != torch_internals.count_groups()
    assert torch_internals.any_group_made()


def test_a_timeout_or_a_sender_that_is_not_known_is_left_open(monkeypatch):
    monkeypatch.setattr(torch_internals.GROUP_TIMEOUT, "is_on", False)
    assert torch_internals.group_timeout(SimpleNamespace()) == timedelta.max
    assert torch_internals.source_rank(SimpleNamespace()) is None


def test_a_typed_storage_is_taken_apart_and_made_without_a_warning(recwarn):
    tensor = torch.arange(3.0)
    torch.storage._reset_warn_typed_storage_removal()  # it warns once
    typed = torch_internals.typed_storage(tensor.untyped_storage(), tensor.dtype)
    assert typed.dtype is torch.float32
    torch.storage._reset_warn_typed_storage_removal()
    assert torch_internals.untyped_storage(typed).data_ptr() == tensor.data_ptr()
    assert not recwarn.list
