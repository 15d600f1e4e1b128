"""Point-to-point: one rank sends, one receives.

Blocking `send`/`recv`, immediate `isend`/`irecv`, several of them in one batch, a receive from any
rank, ranks of a group, a token passed round a ring, and which tensors must not be touched before
`wait()`. Source: "Writing Distributed Applications with PyTorch", section Point-to-Point
Communication.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.launch import Ranks, lesson_parser, open_ranks, prove, run_as_script


def blocking(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Send from each even rank to the next odd rank; both wait until the message is through.

    Returns the tensor of shape (1,) before and after. A rank without a partner keeps its own.
    """
    tensor = torch.tensor([10 * rank], device=device())
    before = tensor.clone()
    if rank % 2 == 1:
        dist.recv(tensor, src=rank - 1)
    elif rank + 1 < world_size:
        dist.send(tensor, dst=rank + 1)
    return {"before": before, "after": tensor}


def immediate(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Send to the right and receive from the left, both at once, on each of two or more ranks.

    Returns the tensors of shape (1,): what the rank held before, and what it received.
    """
    tensor = torch.tensor([10 * rank])  # on the CPU: with nccl, use a batch
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % world_size)
    receiving = dist.irecv(received, src=(rank - 1) % world_size)
    sending.wait()
    receiving.wait()
    return {"before": tensor, "after": received}


def exchange(rank: int, world_size: int) -> list[int]:
    """Swap numbers with both neighbours in one batch, on two or more ranks.

    Returns what came from the left and from the right.
    """
    tensor = torch.tensor([10 * rank], device=device())
    from_left, from_right = torch.empty_like(tensor), torch.empty_like(tensor)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    batch = [
        dist.P2POp(dist.isend, tensor, right),
        dist.P2POp(dist.isend, tensor, left),
        dist.P2POp(dist.irecv, from_left, left),
        dist.P2POp(dist.irecv, from_right, right),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [from_left.item(), from_right.item()]


def read_too_early(rank: int, world_size: int) -> dict[str, int] | None:
    """Read a tensor on rank 1 after `irecv`, both before and after `wait()`; for two ranks.

    The barrier holds rank 0 back until rank 1 has read, as if the sender were slow.
    """
    tensor = torch.tensor([1 - rank], device=device())
    if rank == 0:
        dist.barrier()  # rank 0 is late: it sends only now
        dist.send(tensor, dst=1)
        return None
    work = dist.irecv(tensor, src=0)
    early = tensor.item()  # too early: the message has not arrived yet
    dist.barrier()
    work.wait()
    return {"before wait": early, "after wait": tensor.item()}


def written_too_early(rank: int, world_size: int) -> int:
    """Write to a tensor after `isend` and before `wait()`: rank 0 sends 1, then writes 99.

    Returns what ranks 0 and 1, of two, hold at the end. The barrier takes the place of unlucky
    timing; with gloo it makes the outcome the same every time.
    """
    tensor = torch.tensor([1 - rank], device=device())
    if rank == 0:
        work = dist.isend(tensor, dst=1)
        tensor.fill_(99)  # too early: the message may not have left yet
        dist.barrier()
        work.wait()
    else:
        dist.barrier()  # rank 1 is late: it receives only now
        dist.recv(tensor, src=0)
    return tensor.item()


def from_anyone(rank: int, world_size: int) -> dict[int, int] | None:
    """Receive on rank 0 from all other ranks, in the order in which their messages come.

    Returns what came, by sender; None on the other ranks.
    """
    tensor = torch.tensor([10 * rank])  # on the CPU: nccl cannot receive from any rank
    if rank > 0:
        dist.send(tensor, dst=0)
        return None
    came = {}
    for _ in range(world_size - 1):
        src = dist.recv(tensor)  # no src: whoever is first
        came[src] = tensor.item()
    return came


def last_two(rank: int, world_size: int) -> dict[str, int]:
    """Send from the last rank but one to the last, by their ranks in a group of these two.

    Returns the rank in the group, -1 outside it, and the number that this rank holds at the end.
    """
    group = dist.new_group([world_size - 2, world_size - 1])  # every rank makes this call
    tensor = torch.tensor([10 * rank], device=device())
    group_rank = dist.get_rank(group)
    if group_rank == 0:
        dist.send(tensor, group=group, group_dst=1)
    elif group_rank == 1:
        dist.recv(tensor, group=group, group_src=0)
    return {"rank in the group": group_rank, "holds": tensor.item()}


def token(rank: int, world_size: int) -> list[int]:
    """Pass one tensor round a ring of two or more; each rank signs it, and rank 0 gets it back.

    Returns the token as this rank passed it on, with -1 where nobody had signed yet; rank 0
    returns it as it came back.
    """
    signed = torch.full((world_size,), -1, device=device())
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank > 0:
        dist.recv(signed, src=left)
    signed[rank] = rank
    dist.send(signed, dst=right)
    if rank == 0:
        dist.recv(signed, src=left)
    return signed.tolist()


def main(argv: list[str] | None = None) -> None:
    """Run the workers, compare with what plain lists would hold, and print one line."""
    options = lesson_parser("point_to_point", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        held = [10 * rank for rank in range(n)]
        paired = [held[rank - 1] if rank % 2 else held[rank] for rank in range(n)]
        result = ranks(blocking)
        prove("odd ranks hold what the rank before them sent", _after(result) == paired)
        if n > 1:  # no rank can send to itself
            _prove_on_rings(ranks, held)
        ranks.say(f"point_to_point: {ranks}, every tensor arrived as it was sent")


def _prove_on_rings(ranks: Ranks, held: list[int]) -> None:
    """Run the workers that need a second rank, and compare."""
    n = ranks.world_size
    shifted = [held[(rank - 1) % n] for rank in range(n)]
    both = [[held[rank - 1], held[(rank + 1) % n]] for rank in range(n)]
    signed = [[q if q <= rank else -1 for q in range(n)] for rank in range(n)]
    signed[0] = list(range(n))

    prove("every rank holds what its left neighbour sent", _after(ranks(immediate)) == shifted)
    prove("every rank holds what both neighbours sent", list(ranks(exchange)) == both)
    came = ranks(from_anyone)[0]
    prove("rank 0 received from every other rank", came == dict(list(enumerate(held))[1:]))
    last = {"rank in the group": 1, "holds": held[n - 2]}
    prove("the last rank holds what the one before it sent", ranks(last_two)[n - 1] == last)
    prove("the token came round with every rank on it", list(ranks(token)) == signed)


def _after(result) -> list[int]:
    return [value["after"].item() for value in result]


if __name__ == "__main__":
    run_as_script(main)
