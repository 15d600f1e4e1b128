"""Other right answers to the exercises of lesson 13, and mistakes without a changed solution."""

from __future__ import annotations

import pytest
import torch
from answers import assert_mistake
from torch import nn

import ddp_kit as kit
from ddp_kit.lessons import one_rank_first as lesson
from ddp_kit.lessons._gpt import loss_of

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_attention_may_have_its_scores_written_out(capsys):
    class Attention(lesson.Attention):
        def forward(self, x):
            q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
            return self.out(mixed.transpose(1, 2).flatten(2))

    assert kit.check.exercise_13_a(Attention) == 1


def test_a_step_that_keeps_the_activations_of_all_micro_batches_is_refused():
    def train_step(model, optimizer, inputs, targets, micro_batches, max_norm):
        losses = []
        for part in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(loss_of(model, *part) / micro_batches)
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        if norm < float("inf"):
            optimizer.step()
        optimizer.zero_grad()
        return sum(losses).item(), norm

    fact = "frees activations"
    assert_mistake(kit.check.exercise_13_9, train_step, "unknown", fact)
