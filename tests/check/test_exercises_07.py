"""Wrong answers to the exercises of lesson 07, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_parts_may_be_cut_one_after_the_other(capsys):
    def in_parts(function, batch, n):
        def lengths(value):
            if isinstance(value, torch.Tensor):
                return [len(chunk) for chunk in value.chunk(n)]
            members = value.values() if isinstance(value, dict) else value
            several = isinstance(value, dict | list | tuple)
            return next(filter(None, map(lengths, members)), None) if several else None

        def taken(value, begin, end):
            if isinstance(value, torch.Tensor):
                return value[begin:end]
            if isinstance(value, dict):
                return {key: taken(each, begin, end) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return type(value)([taken(each, begin, end) for each in value])
            return value

        def joined(first, *others):
            if isinstance(first, torch.Tensor):
                return torch.cat([torch.atleast_1d(each) for each in (first, *others)])
            if isinstance(first, dict):
                return {key: joined(*(each[key] for each in (first, *others))) for key in first}
            if isinstance(first, list | tuple):
                return type(first)([joined(*each) for each in zip(first, *others, strict=True)])
            return first

        outputs, begin = [], 0
        for length in lengths(batch):
            outputs.append(function(taken(batch, begin, begin + length)))
            begin += length
        return joined(*outputs)

    assert kit.check.exercise_7_3(in_parts) == 1
    assert capsys.readouterr().out == "Exercise 7.3: right for nested batches.\n"


def test_other_ways_to_the_same_dataparallel_are_right():
    def by_hand(module, places):
        def forward(batch):
            outputs = []
            for number, chunk in enumerate(batch.chunk(len(places))):
                own = dict(module.named_parameters())
                copies = {name: tensor.clone() for name, tensor in own.items()}
                outputs.append(functional_call(module, copies if number else own, chunk))
            return torch.cat(outputs)

        return forward

    assert kit.check.exercise_7_c(by_hand) == 1

    def scatter(batch, places):
        length = -(-len(batch) // len(places))
        chunks = [batch[i : i + length] for i in range(0, len(batch), length)]
        copies = [torch.empty_like(c, device=p) for c, p in zip(chunks, places, strict=False)]
        return [chunks[0], *(n.copy_(c) for n, c in zip(copies[1:], chunks[1:], strict=True))]

    assert kit.check.exercise_7_a(scatter) == 1

    def replicate(model, places):
        own = model.state_dict(keep_vars=True)
        return [
            own,
            *({k: v.clone().to(place) for k, v in own.items()} for place in places[1:]),
        ]

    assert kit.check.exercise_7_b(replicate) == 1
