"""DistributedDataParallel: what it sends and when, and what it leaves to you.

The constructor's broadcast, gradients in buckets and their overlap with backward, `no_sync`,
parameters that get no gradient, buffers, and the `DistributedSampler`. Here
`DistributedDataParallel` is the one by hand, and `nn.parallel.DistributedDataParallel` is
PyTorch's. Source: "Writing Distributed Applications with PyTorch", section Distributed Training,
and two notes on DDP.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from ddp_kit import compare, device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons import _ddp_by_hand as by_hand  # noqa: F401 - its name is public
from ddp_kit.lessons._ddp_buckets import (  # noqa: F401 - the notebook uses them
    OPTIONS,
    Stack,
    backwards,
    carry_slowly,
    explore,
    on_one_axis,
    one_backward,
    step_seconds,
    typical,
    watch,
)
from ddp_kit.lessons._ddp_by_hand import (  # noqa: F401 - the notebook uses them
    Bucket,
    BucketedDistributedDataParallel,
    ByHand,
    DistributedDataParallel,
    Replicated,
    buckets_by_hand,
    shard_gradient,
    tied_and_frozen,
    train_tied,
)
from ddp_kit.lessons._digits import first_digits, flat
from ddp_kit.lessons.partitioned_sgd import SEED, Net, average_gradients, whole_batch_gradient
from ddp_kit.trace import Trace

# This argument was called broadcast_buffers until PyTorch 2.13.
_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
SYNC_BUFFERS = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in _ARGUMENTS)


def construct(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Make a network from a different seed on every rank and wrap it in DDP.

    Returns all parameters before and after, each as one flat tensor.
    """
    torch.manual_seed(rank)
    model = Net().to(device())
    before = flat(model.parameters())
    nn.parallel.DistributedDataParallel(model)
    return {"before": before, "after": flat(model.parameters())}


def one_step(rank: int, world_size: int, per_rank: int = 32) -> dict[str, torch.Tensor]:
    """Compute the gradient of this rank's digits three times, from the same start.

    Returns three flat gradients: the rank's "own", that after "average_gradients", and that
    after a backward of "DDP".
    """
    images, labels = first_digits(per_rank * world_size)
    images, labels = images[rank::world_size], labels[rank::world_size]
    gradients = {}
    for name in ("own", "average_gradients", "DDP"):
        torch.manual_seed(SEED)
        model: nn.Module = Net().to(device()).eval()  # dropout would differ from rank to rank
        if name == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        F.nll_loss(model(images), labels).backward()
        if name == "average_gradients":
            average_gradients(model)
        gradients[name] = flat(parameter.grad for parameter in model.parameters())
    return gradients


def accumulate(
    rank: int, world_size: int, pieces: int = 4, silent: bool = True, piece: int = 8
) -> torch.Tensor:
    """Accumulate the gradients of several small batches, as before one optimizer step.

    silent: run all backwards but the last under `no_sync`. piece: digits in a small batch.
    Returns the flat gradient of the mean loss over all batches of all ranks.
    """
    torch.manual_seed(SEED)
    model = nn.parallel.DistributedDataParallel(Net().to(device()).eval())
    images, labels = first_digits(piece * pieces * world_size)
    mine = zip(
        images[rank::world_size].split(piece), labels[rank::world_size].split(piece), strict=True
    )
    for count, (x, y) in enumerate(mine, 1):
        with model.no_sync() if silent and count < pieces else nullcontext():
            (F.nll_loss(model(x), y) / pieces).backward()
    return flat(parameter.grad for parameter in model.parameters())


def deal(
    rank: int,
    world_size: int,
    length: int,
    shuffle: bool = False,
    drop_last: bool = False,
    epochs: Iterable[int] = (0,),
) -> list[list[int]]:
    """Return this rank's positions in a dataset from a DistributedSampler, once per epoch.

    epochs: the argument of `set_epoch` before each.
    """
    sampler = DistributedSampler(range(length), shuffle=shuffle, drop_last=drop_last)
    dealt = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        dealt.append(list(sampler))
    return dealt


def deal_by_hand(length: int, world_size: int, drop_last: bool = False) -> list[list[int]]:
    """Deal positions out like cards, one to each rank in turn; return each rank's.

    Every rank gets equally many: the last round is filled up from the beginning or dropped.
    """
    rounds = length // world_size if drop_last else -(-length // world_size)
    cards = [card % length for card in range(rounds * world_size)]
    return [cards[rank::world_size] for rank in range(world_size)]


def pull(
    rank: int,
    world_size: int,
    lr: float = 0.1,
    hook: Callable | None = None,
    unwrap: bool = False,
    steps: int = 12,
) -> list[float]:
    """Train one weight, from 0, towards this rank's own target of 10 * rank.

    hook: the communication hook that replaces DDP's mean. unwrap: train `model.module` instead
    of the wrapped model. Returns the weight after each step.
    """
    weight = nn.Linear(1, 1, bias=False).to(device())
    nn.init.zeros_(weight.weight)
    model = nn.parallel.DistributedDataParallel(weight)
    if hook is not None:
        model.register_comm_hook(None, hook)
    if unwrap:
        model = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    one = torch.ones(1, 1, device=device())
    target = torch.tensor([[10.0 * rank]], device=device())
    held = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(one), target).backward()
        optimizer.step()
        held.append(weight.weight.item())
    return held


def sum_gradients(_, bucket):
    """Sum a bucket over all ranks without dividing: a hook for `register_comm_hook`."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Heads(nn.Module):
    """A trunk and two heads of one weight each; each forward uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(1, 1, bias=False)
        self.heads = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """Apply the trunk and one head; x and the output have shape (batch, 1)."""
        return self.heads[head](self.trunk(x))


def use_heads(
    rank: int, world_size: int, find_unused_parameters: bool, heads: list[int], steps: int = 1
) -> dict[str, float | None]:
    """Run some backwards of Heads: this rank uses head `heads[rank]` and 10 ** rank as input.

    Returns the gradient of each parameter after the last one, None where it has none.
    """
    model = Heads().to(device())
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    x = torch.full((1, 1), 10.0**rank, device=device())
    for _ in range(steps):
        model.zero_grad()
        ddp(x, heads[rank]).sum().backward()
    names = {"trunk": model.trunk, "head 0": model.heads[0], "head 1": model.heads[1]}
    gradients = {name: layer.weight.grad for name, layer in names.items()}
    return {name: None if g is None else g.item() for name, g in gradients.items()}


def running_means(rank: int, world_size: int, sync: bool = True) -> dict[str, torch.Tensor]:
    """Return the running mean of a BatchNorm during two forwards, as tensors of shape (1,).

    This rank's data has the mean 8 * (rank + 1). The running mean starts at 0, and each
    forward moves it halfway there. sync: broadcast rank 0's buffers, DDP's default.
    """
    norm = nn.BatchNorm1d(1, momentum=0.5).to(device())
    seen: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda *_: seen.append(norm.running_mean.clone()))
    norm.register_forward_hook(lambda *_: seen.append(norm.running_mean.clone()))
    model = nn.parallel.DistributedDataParallel(norm, **{SYNC_BUFFERS: sync})
    for _ in range(2):
        x = 8.0 * (rank + 1) + torch.tensor([[-1.0], [1.0]], device=device())
        model(x).sum().backward()
    return {
        "after forward 1": seen[1],
        "at the start of forward 2": seen[2],
        "after forward 2": seen[3],
    }


def count_calls(trace: Trace) -> Counter[str]:
    """Count the collectives of a trace by call, such as "DDP broadcast(src=0)"."""
    return Counter(next(iter(call.values())).call for call in trace.collectives)


def main(argv: list[str] | None = None) -> None:
    """Run the workers, compare with what one process computes, and print one line."""
    options = lesson_parser("ddp", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        for length, drop_last in ((1, False), (10, False), (10, True), (4 * n, False)):
            hands = [dealt for (dealt,) in ranks(deal, length, False, drop_last)]
            prove("positions are dealt as by hand", hands == deal_by_hand(length, n, drop_last))
            shuffled = [dealt for (dealt,) in ranks(deal, length, True, drop_last, (7,))]
            prove("shuffling deals each position as often", how_often(shuffled) == how_often(hands))
        prove_start_and_mean(ranks)
        prove_by_hand(ranks)
        prove_no_sync(ranks)
        ranks.say(f"ddp: {ranks}, equal start, mean gradients; no_sync and sampler as by hand")


def prove_start_and_mean(ranks) -> None:
    """Prove that DDP copies rank 0's parameters, and leaves the mean gradient."""
    result = ranks(construct)
    start = result[0]["before"]
    started = compare([r["after"] for r in result], start, rtol=0, atol=0)
    prove("replicas start as rank 0's", started)
    prove("they were different", not any(torch.equal(r["before"], start) for r in result[1:]))
    result = ranks(one_step)
    own = [r["own"] for r in result]
    mean = torch.stack(own).mean(0)
    for name in ("DDP", "average_gradients"):
        found = compare([r[name] for r in result], mean, parts=own)
        prove(f"{name} leaves the mean of the ranks' gradients", found)


def prove_by_hand(ranks) -> None:
    """Prove that DDP by hand and PyTorch's train as one process does, tied and frozen weights too.

    By hand, each backward sends three gradients, or one bucket.
    """
    rows = 4 * ranks.world_size
    alone = train_tied(0, 1, lambda module: module, rows)
    wrappers = (
        (DistributedDataParallel, 9),
        (BucketedDistributedDataParallel, 3),
        (nn.parallel.DistributedDataParallel, 0),
    )
    for wrap, calls in wrappers:
        result = ranks(train_tied, wrap, rows)
        prove(f"{wrap.__name__} trains as one process does", compare(result, alone))
        count = count_calls(result.trace)["all_reduce"]
        prove(f"{wrap.__name__} sends {calls} messages by hand", count == calls)


def prove_no_sync(ranks) -> None:
    """Prove that four small batches give one large batch's gradient, in one exchange."""
    reference = whole_batch_gradient(8 * 4 * ranks.world_size)
    for silent, exchanges in ((True, 1), (False, 4)):
        result = ranks(accumulate, 4, silent)
        found = compare(result, reference)
        prove("accumulated gradients are those of one large batch", found)
        count = count_calls(result.trace)["DDP all_reduce"]
        prove(f"{exchanges} of 4 backwards exchanged gradients", count == exchanges)


def how_often(hands: list[list[int]]) -> list[int]:
    """Return how many positions were dealt once, how many twice, and so on."""
    counts = Counter(Counter(card for hand in hands for card in hand).values())
    return [counts[often] for often in range(1, 1 + max(counts, default=0))]


if __name__ == "__main__":
    run_as_script(main)
