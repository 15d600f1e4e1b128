"""The proof of the lesson on what a step costs on one rank."""

from __future__ import annotations

import torch

from ddp_kit import compare, device
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove


def count_step(rank, world_size):
    """Return what this rank's steps cost, each on rank + 1 sequences.

    "logits": of the lesson's GPT, and of that of the other lessons. "block": the bytes that one
    keeps. "steps": FLOPs, kept bytes and gradients by what is recomputed: nothing, all but products
    and attention, all.
    """
    batch, steps = next(batches(rank + 1, 1)), []
    for wrap in (lambda block: block, lesson.selective, lesson.checkpoint_wrapper):
        model = lesson.recomputing(wrap)
        nbytes, _ = lesson.kept_by(model, batch)
        loss_of(model, *batch).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        steps.append((lesson.count_flops(lesson.recomputing(wrap), batch), nbytes, gradients))
    gpt, own = make_gpt(), lesson.GPT(Config()).to(device())
    own.load_state_dict(gpt.state_dict())
    with lesson.Kept() as kept:
        out = gpt.blocks[0](torch.ones(rank + 1, 64, 64, device=device()))
    block = kept.nbytes - out.nbytes
    return {"logits": (own(batch[0]), gpt(batch[0])), "block": block, "steps": steps}


@lesson_main("one_rank_first")
def main(ranks: Ranks) -> str:
    """Count FLOPs and bytes on every rank, compare them with the formulas, and print one line."""
    tokens = 64 * lesson.flops_per_token(layers=2, width=64, context=64, vocabulary=128)
    for rank, found in enumerate(ranks(count_step)):
        own, reference = found["logits"]
        prove("both GPTs are the same", compare(own, reference, rtol=0, atol=0))
        none, selective, full = found["steps"]
        flops = tokens * (rank + 1)
        prove("a step has the FLOPs of the formula", none[0] == selective[0] == flops < full[0])
        prove("recomputation keeps less", none[1] > selective[1] > full[1])
        for _, _, gradients in (selective, full):
            prove("recomputation changes no bit", compare(gradients, none[2], rtol=0, atol=0))
        if own.device.type == "cpu":  # kernels of a GPU keep some bytes more
            nbytes = lesson.layer_keeps(64 * (rank + 1), 64, 4)
            prove("a block keeps the bytes of the formula", found["block"] == nbytes)
    return "FLOPs and bytes of a step are those of the formulas, recomputed bit-equal"


from ddp_kit.lessons import one_rank_first as lesson
