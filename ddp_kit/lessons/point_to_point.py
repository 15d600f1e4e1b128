# Made from notebooks/01_point_to_point.ipynb by `make editions`: edit that, not this.
"""Point-to-point: one rank sends, one receives."""

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._point_to_point import main


def blocking(rank, world_size):
    tensor = torch.tensor([10 * rank], device=kit.device())
    before = tensor.clone()
    if rank % 2 == 1:
        dist.recv(tensor, src=rank - 1)
    elif rank + 1 < world_size:
        dist.send(tensor, dst=rank + 1)
    return {"before": before, "after": tensor}


def take_turns(rank, world_size):
    tensor = torch.tensor([10 * rank], device=kit.device())
    received = torch.empty_like(tensor)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank % 2 == 0:
        dist.send(tensor, dst=right)
        dist.recv(received, src=left)
    else:
        dist.recv(received, src=left)
        dist.send(tensor, dst=right)
    return received.item()


def immediate(rank, world_size):
    tensor = torch.tensor([10 * rank])  # on the CPU, for gloo
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % world_size)
    receiving = dist.irecv(received, src=(rank - 1) % world_size)
    sending.wait()
    receiving.wait()
    return {"before": tensor, "after": received}


def exchange(rank, world_size):
    tensor = torch.tensor([10 * rank], device=kit.device())
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


def read_too_early(rank, world_size):
    tensor = torch.tensor([1 - rank], device=kit.device())
    if rank == 0:
        dist.barrier()  # rank 0 is late: it sends only now
        dist.send(tensor, dst=1)
        return None
    work = dist.irecv(tensor, src=0)
    early = tensor.item()  # too early: the message has not arrived yet
    dist.barrier()
    work.wait()
    return {"before wait": early, "after wait": tensor.item()}


def written_too_early(rank, world_size):
    tensor = torch.tensor([1 - rank], device=kit.device())
    if rank == 0:
        work = dist.isend(tensor, dst=1)
        tensor.fill_(99)  # too early: the message may not have left yet
        dist.barrier()
        work.wait()
    else:
        dist.barrier()  # rank 1 is late: it receives only now
        dist.recv(tensor, src=0)
    return tensor.item()


def from_anyone(rank, world_size):
    tensor = torch.tensor([10 * rank])  # on the CPU, for gloo
    if rank > 0:
        dist.send(tensor, dst=0)
        return None
    came = {}
    for _ in range(world_size - 1):
        src = dist.recv(tensor)  # no src: whoever is first
        came[src] = tensor.item()
    return came


def token(rank, world_size):
    signed = torch.full((world_size,), -1, device=kit.device())
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank > 0:
        dist.recv(signed, src=left)
    signed[rank] = rank
    dist.send(signed, dst=right)
    if rank == 0:
        dist.recv(signed, src=left)
    return signed.tolist()


if __name__ == "__main__":
    run_as_script(main)
