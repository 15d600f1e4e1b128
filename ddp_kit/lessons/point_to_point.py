"""Point-to-point: one rank sends, one receives.

Blocking `send`/`recv`, immediate `isend`/`irecv`, a token passed round a ring, and which tensors
must not be touched before `wait()`. Source: "Writing Distributed Applications with PyTorch",
section Point-to-Point Communication.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script


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
    """Send to the right and receive from the left, both at once, on every rank.

    Returns the tensors of shape (1,): what the rank held before, and what it received.
    """
    tensor = torch.tensor([10 * rank], device=device())
    received = tensor.clone()
    if world_size > 1:  # no rank can send to itself
        sending = dist.isend(tensor, dst=(rank + 1) % world_size)
        receiving = dist.irecv(received, src=(rank - 1) % world_size)
        sending.wait()
        receiving.wait()
    return {"before": tensor, "after": received}


def token(rank: int, world_size: int) -> list[int]:
    """Pass one tensor round the ring; each rank signs it, and rank 0 gets it back.

    Returns the token as this rank passed it on, with -1 where nobody had signed yet; rank 0
    returns it as it came back.
    """
    signed = torch.full((world_size,), -1, device=device())
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank > 0:
        dist.recv(signed, src=left)
    signed[rank] = rank
    if world_size > 1:
        dist.send(signed, dst=right)
        if rank == 0:
            dist.recv(signed, src=left)
    return signed.tolist()


def written_too_early(rank: int, world_size: int) -> int | None:
    """Write to a tensor after `isend` and before `wait()`: rank 0 sends 1, then writes 99.

    Returns what ranks 0 and 1 hold at the end. The barrier takes the place of unlucky timing;
    with gloo it makes the outcome the same every time.
    """
    if rank > 1 or world_size == 1:
        dist.barrier()
        return None
    tensor = torch.tensor([1 if rank == 0 else 0], device=device())
    if rank == 0:
        work = dist.isend(tensor, dst=1)
        tensor.fill_(99)  # too early: the message may not have left yet
        dist.barrier()
    else:
        dist.barrier()
        work = dist.irecv(tensor, src=0)
    work.wait()
    return tensor.item()


def read_too_early(rank: int, world_size: int) -> dict[str, int] | None:
    """Read a tensor on rank 1 after `irecv`, both before and after `wait()`.

    The barrier holds rank 0 back until rank 1 has read, as if the sender were slow.
    """
    if rank != 1:
        dist.barrier()
        if rank == 0 and world_size > 1:
            dist.send(torch.tensor([1], device=device()), dst=1)
        return None
    tensor = torch.tensor([0], device=device())
    work = dist.irecv(tensor, src=0)
    early = tensor.item()
    dist.barrier()
    work.wait()
    return {"before wait": early, "after wait": tensor.item()}


def main(argv: list[str] | None = None) -> None:
    """Run the workers, compare with what plain lists would hold, and print one line."""
    options = lesson_parser("point_to_point", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        held = [10 * rank for rank in range(n)]
        paired = [held[rank - 1] if rank % 2 else held[rank] for rank in range(n)]
        shifted = [held[(rank - 1) % n] for rank in range(n)]
        signed = [[q if q <= rank else -1 for q in range(n)] for rank in range(n)]
        signed[0] = list(range(n))

        result = ranks(blocking)
        prove("odd ranks hold what the rank before them sent", _after(result) == paired)
        result = ranks(immediate)
        prove("every rank holds what its left neighbour sent", _after(result) == shifted)
        prove("the token came round with every rank on it", list(ranks(token)) == signed)
        ranks.say(f"point_to_point: {ranks}, every tensor arrived as it was sent")


def _after(result) -> list[int]:
    return [value["after"].item() for value in result]


if __name__ == "__main__":
    run_as_script(main)
