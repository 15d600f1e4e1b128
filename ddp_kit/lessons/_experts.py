"""The proof of the lesson on expert parallelism, and what its cells need besides."""

from __future__ import annotations

import torch

from ddp_kit import compare, device
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.zero import ADAM, copies

WIDTH = 64  # of a token


def make_moe(count, skew=0.0):
    """Return a layer of `count` experts, the same in every process; skew: the bias of expert 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        moe = lesson.MoE(WIDTH, count)
    moe.bias[0] += skew
    return moe.to(device())


def some_tokens(length):
    """Return tokens of the shape (length, WIDTH), and a gradient of what becomes of them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, length, WIDTH, generator=generator).to(device())


def make_gpt_with_experts(count):
    """Return the GPT with experts in its first block, the same in every process."""
    model = make_gpt()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.blocks[0] = lesson.MoEBlock(Config(), make_moe(count))
    return model.to(device())


def use_alone(n, count, length, skew=0.0):
    """Return what each rank should find in `use`, from one process with all experts."""
    moe, (tokens, gradient) = make_moe(count, skew), some_tokens(length)
    output = moe(tokens.requires_grad_())
    output.backward(gradient)
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    rows = zip(output.detach().chunk(n), tokens.grad.chunk(n), strict=True)
    return [{"output": own, "tokens": of_tokens} | gradients for own, of_tokens in rows]


def train_alone(count=8, size=8, steps=3, balance=None):
    """Train the GPT with all experts in this process; return "losses" and "parameters"."""
    model = make_gpt_with_experts(count)
    moe, optimizer, losses = model.blocks[0].mlp, ADAM(model.parameters()), []
    for batch in batches(size, steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        losses.append(loss.item())
        load = torch.bincount(moe.choice.flatten(), minlength=count).float()
        if balance == "loss":
            loss = loss + lesson.WEIGHT * lesson.balance_loss(moe.scores, load)
        loss.backward()
        optimizer.step()
        if balance == "bias":
            moe.bias += lesson.RATE * (load.mean() - load).sign()
    return {"losses": losses, "parameters": copies(model)}


def of_rank(alone, mine):
    """Return the values of one process whose names a rank has, whose experts are not all."""
    return {
        name: of_rank(alone[name], value) if isinstance(value, dict) else alone[name]
        for name, value in mine.items()
    }


def dispatches(trace, rank):
    """Return a rank's all_to_alls of tokens to the experts: every fourth of those with rows."""
    rows = [e for e in trace if e.rank == rank and e.splits and e.dtype == "float32"]
    return rows[::4]  # then follow the combine, and the backward of both


@lesson_main("experts")
def main(ranks: Ranks) -> str:
    """Compare a layer and training with one process, and print one line."""
    n = ranks.world_size
    count, length = 2 * n, 16 * n
    for skew in (0.0, 100.0):  # with 100, each token goes to expert 0
        result = ranks(lesson.use, count, length, skew)
        for mine, alone in zip(result, use_alone(n, count, length, skew), strict=True):
            prove(f"one process, skew {skew}", compare(mine, of_rank(alone, mine)))
    for replicas, balance in ((1, None), (1, "loss"), (1 + (n % 2 == 0), "bias")):
        alone = train_alone(count, 2 * n, 3, balance)
        for mine in ranks(lesson.train, replicas, balance, 3, count, 2 * n):
            kept = {name: mine[name] for name in alone}
            found = compare(kept, of_rank(alone, kept))
            prove(f"{replicas} replicas train as one process", found)
    return "experts, with and without replicas, train as one process does"


from ddp_kit.lessons import experts as lesson
