"""Context parallelism: ranks share one sequence that is too long for each of them.

    ring attention    queries stay, and keys and values travel round the ring
    zig-zag           which tokens a rank holds, so that causal attention is the same work for all
    Ulysses           all_to_all gives each rank some heads of the whole sequence
    experts           all_to_all brings each token to the rank of its expert

Each is built by hand and compared with one process: values, gradients, and a GPT that is trained.
Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023),
https://arxiv.org/abs/2310.01889; Jacobs et al., "DeepSpeed Ulysses" (2023),
https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_kit import compare, device
from ddp_kit.launch import choose, lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._all_to_all import (  # noqa: F401 - the notebook uses them
    AllToAll,
    check_tokens,
    exchange_rows,
    to_heads,
    to_sequence,
    ulysses,
)
from ddp_kit.lessons._experts import (  # noqa: F401
    AllExperts,
    Experts,
    counts_of,
    gradients,
    make_experts,
    route,
    some_tokens,
    use_experts,
    use_experts_alone,
)
from ddp_kit.lessons._gpt import GPT, Config, batches, make_gpt
from ddp_kit.lessons._ring_attention import (  # noqa: F401
    BlockGradients,
    OnlineSoftmax,
    RingAttention,
    Shards,
    attend_backward,
    attend_forward,
    attend_gathered,
    cut,
    in_order,
    needed,
    places,
    ring_attention,
    room_for,
    scores,
    slices,
    slow_exchange,
    start_exchange,
    travel,
    wait_for,
    zig_zag,
)
from ddp_kit.lessons.zero import ADAM, BATCH, SGD, copies, count_bytes, train_alone
from ddp_kit.trace import Trace

DEALS = {"ring": in_order, "zig-zag": zig_zag, "Ulysses": in_order}
WAYS = tuple(DEALS)
WIDTH = 8  # of a head
Tensors = dict[str, torch.Tensor]


def attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int
) -> torch.Tensor:
    """Return the attention to all keys, of which only `size` are looked at at a time."""
    softmax = OnlineSoftmax(query)
    for keys, values in zip(key.split(size, 2), value.split(size, 2), strict=True):
        softmax.add(scores(query, keys, masked=False), values)
    return softmax.output()


def example(length: int, heads: int) -> list[torch.Tensor]:
    """Return a query, key, value, and a gradient of the output, the same in every process.

    Each has shape (2, heads, length, WIDTH).
    """
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(4, 2, heads, length, WIDTH, generator=generator).to(device()))


def attention(way: str, shards: Shards) -> Callable[..., torch.Tensor]:
    """Return the attention of one of the `WAYS`: it takes a query, a key and a value."""
    return partial(ulysses if way == "Ulysses" else ring_attention, shards=shards)


def attend(
    rank: int, world_size: int, way: str, causal: bool, length: int, backward: bool = True
) -> list[torch.Tensor]:
    """Return this rank's rows of the attention, and of the gradients of query, key and value."""
    shards = choose("way", way, DEALS)(length, world_size)
    own = places(shards[rank]).to(device())
    query, key, value, gradient = (x[:, :, own] for x in example(length, 2 * world_size))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = attention(way, shards)(*inputs, causal=causal)
    if not backward:
        return [output.detach()]
    output.backward(gradient)
    return [output.detach(), *(x.grad for x in inputs)]


def attend_alone(world_size: int, causal: bool, length: int) -> list[torch.Tensor]:
    """Return what all ranks' rows make up, from PyTorch's own attention in this one process."""
    *inputs, gradient = example(length, 2 * world_size)
    output = F.scaled_dot_product_attention(*(x.requires_grad_() for x in inputs), is_causal=causal)
    output.backward(gradient)
    return [output.detach(), *(x.grad for x in inputs)]


def put_together(parts: Iterable[torch.Tensor], shards: Shards) -> torch.Tensor:
    """Return the whole of which each rank has the rows of its shard."""
    joined = torch.cat([part.cpu() for part in parts], 2)
    return joined[:, :, torch.cat([places(shard) for shard in shards]).argsort()]


def pairs_of(
    rank: int,
    world_size: int,
    deal: Callable[[int, int], Shards],
    attend_forward: Callable[..., Any],
    length: int,
    causal: bool = True,
) -> list[tuple[int, range, range, int]]:
    """Return what this rank computes in a ring, in order.

    deal, attend_forward: `in_order` or `zig_zag`, and the forward of the ring, or others like them.
    Each entry has a step, the positions of the queries and the keys, and how many pairs of them
    have a score.
    """
    shards, done = deal(length, world_size), []
    shard = [list(slices(each)) for each in shards]

    def note(owner: int, rows: slice, columns: slice, pairs: int) -> None:
        (queries,) = (chunk for where, chunk in shard[rank] if where == rows)
        (keys,) = (chunk for where, chunk in shard[owner] if where == columns)
        done.append(((rank - owner) % world_size, queries, keys, pairs))

    own = places(shards[rank]).to(device())
    query, key, value = (x[:, :, own] for x in example(length, 1)[:3])
    attend_forward(query, key, value, shards, causal, note)
    return done


def pairs_by_step(done: Sequence[tuple[int, range, range, int]], n: int) -> list[int]:
    """Return how many pairs a rank computes in each of n steps."""
    return [sum(pairs for step, *_, pairs in done if step == each) for each in range(n)]


def ring_bytes(n: int, batch: int, length: int, width: int) -> tuple[float, float]:
    """Return the bytes of float32 that a rank sends in a forward and a backward, on average.

    width: of all heads. Forward: n-1 of n blocks of keys and values. Backward: the same, and n
    blocks of gradients.
    """
    whole = 2 * batch * length * width * 4
    forward = (n - 1) / n * whole
    return forward, forward + (whole if n > 1 else 0)


def ulysses_bytes(n: int, batch: int, length: int, width: int) -> tuple[float, float]:
    """Return what `ring_bytes` does for Ulysses: four all_to_alls, there and back."""
    forward = 4 * (n - 1) / n**2 * batch * length * width * 4
    return forward, forward


def sent(trace: Trace) -> float:
    """Return the bytes that a rank sent, on average."""
    n = trace.world_size
    return sum(sum(count_bytes(trace, rank).values()) for rank in range(n)) / n


def spread(model: GPT, attend: Callable[..., torch.Tensor]) -> None:
    """Let all blocks of a model attend in another way."""
    for block in model.blocks:
        block.attention.attend = attend


def loss_of_part(model: GPT, batch: Sequence[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
    """Return what a rank's positions add to the mean loss of a batch."""
    inputs, targets = (both[:, own] for both in batch)
    logits = model(inputs, own).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / batch[0].numel()


def train(
    rank: int,
    world_size: int,
    way: str = "zig-zag",
    optimizer_cls: Callable = SGD,
    steps: int = 3,
) -> dict[str, Any]:
    """Train a GPT on this rank's tokens of each sequence, in one of the `WAYS`.

    Returns "losses", of whole batches, and "parameters", as `zero.train_alone` does.
    """
    model = make_gpt()
    shards = choose("way", way, DEALS)(Config().context, world_size)
    own = places(shards[rank]).to(device())
    spread(model, attention(way, shards))
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        loss = loss_of_part(model, batch, own)
        loss.backward()
        for summand in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(summand)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": copies(model)}


def watch_memory(
    rank: int,
    world_size: int,
    deal: Callable[[int, int], Shards],
    attend: Callable[..., torch.Tensor],
    length: int,
) -> dict[str, int]:
    """Return the bytes that this rank keeps for the backward of one sequence, by kind.

    deal: `in_order` or `zig_zag`. attend: `ring_attention`, `ulysses` or `all_scores`.
    """
    config = Config(context=length)
    model, kinds, seen = make_gpt(config), {"attention": 0, "other layers": 0}, set()
    seen |= {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(kind: str) -> torch.autograd.graph.saved_tensors_hooks:
        def note(tensor: torch.Tensor) -> torch.Tensor:
            memory = tensor.untyped_storage()
            kinds[kind] += memory.nbytes() * (memory.data_ptr() not in seen)
            seen.add(memory.data_ptr())
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def watched(*heads: torch.Tensor) -> torch.Tensor:
        with keep("attention"):
            return attend(*heads, shards)

    shards = deal(length, world_size)
    own = places(shards[rank]).to(device())
    spread(model, watched)
    with keep("other layers"):
        loss = loss_of_part(model, next(batches(1, 1, length)), own)
    loss.backward()  # until here, it has kept all of them
    return kinds


def all_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shards: Shards
) -> torch.Tensor:
    """Return the causal attention by the formula, with all scores at once, on one rank."""
    return torch.softmax(scores(query, key, masked=True), -1) @ value


def main(argv: list[str] | None = None) -> None:
    """Compare everything with one process, count pairs and bytes, and print one line."""
    options = lesson_parser("context_parallel", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        prove_attention(ranks)
        for skew in (0.0, 100.0):
            found = list(ranks(use_experts, 16 * n + 1, skew))
            for each in found:
                each.pop("received")
            alone = use_experts_alone(n, 16 * n + 1, skew)
            prove(f"experts equal one process, skew {skew}", compare(found, alone))
        for optimizer_cls in (SGD, ADAM):
            alone = train_alone(optimizer_cls)
            for way in WAYS:
                if way != "Ulysses" or Config().heads % n == 0:
                    found = list(ranks(train, way, optimizer_cls))
                    prove(f"{way} trains as one process does", compare(found, alone))
        ranks.say(f"context_parallel: {ranks}, ring, Ulysses and experts equal one process")


def prove_attention(ranks) -> None:
    """Check that all ways have the values, gradients, bytes and pairs that they should."""
    n = ranks.world_size
    length = 6 * n + 1  # uneven
    formula = {"ring": ring_bytes, "zig-zag": ring_bytes, "Ulysses": ulysses_bytes}
    for way in WAYS:
        shards = DEALS[way](length, n)
        for causal in (True, False):
            result = ranks(attend, way, causal, length)
            whole = [put_together(parts, shards) for parts in zip(*result, strict=True)]
            expected = [x.cpu() for x in attend_alone(n, causal, length)]
            prove(f"{way} attends as one process does", compare(whole, expected))
            counted = sum(formula[way](n, 2, length, 2 * n * WIDTH))
            prove(f"{way} sends {counted:,.0f} bytes", compare(sent(result.trace), counted))
    for way, expected in ("ring", list(range(4, 4 * n + 1, 4))), ("zig-zag", [2 * n + 1] * n):
        done = ranks(pairs_of, DEALS[way], attend_forward, 2 * n)
        found = [sum(pairs_by_step(each, n)) for each in done]
        prove(f"the ranks compute {expected} pairs", found == expected)


if __name__ == "__main__":
    run_as_script(main)
