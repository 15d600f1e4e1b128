"""Beyond one machine: torchrun's environment, and training that survives a rank's death.

A worker that returns its numbers in torchrun's environment, a rendezvous by hand, and a worker that
saves a checkpoint after each training step and resumes from it when torchrun restarts it, on as
many ranks as are left. Source: the documentation of torchrun (torch.distributed.elastic).
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.launch import attempt, lesson_parser, open_ranks, prove, run_as_script

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
LOOPBACK = "127.0.0.1"
FEATURES, BATCH, LEARNING_RATE = 4, 24, 0.1
ATTEMPTS = "attempts.txt"


def my_place(rank: int, world_size: int) -> dict[str, int | None]:
    """Return this process's numbers in torchrun's environment; None where a variable is unset."""
    texts = {name: os.environ.get(name) for name in NAMES}
    return {name: None if text is None else int(text) for name, text in texts.items()}


def rendezvous(rank: int, world_size: int, port: int, per_host: int = 2) -> tuple[int, list[int]]:
    """Play the agent of a host: get a number from a store; return it, and the ranks of this host.

    The process of rank 0 keeps the store at `port`, as host 0 does for c10d.
    """
    limit = timedelta(seconds=30)
    store = dist.TCPStore(
        LOOPBACK, port, is_master=rank == 0, wait_for_workers=False, timeout=limit
    )
    number = store.add("hosts", 1) - 1
    if number == world_size - 1:
        store.set("complete", "yes")
    store.wait(["complete"])
    if store.add("done", 1) == world_size:
        store.set("all done", "yes")
    if rank == 0:  # the store ends with its process, so all must have read it
        store.wait(["all done"])
    return number, [number * per_host + local_rank for local_rank in range(per_host)]


def wait_for(file: Path, seconds: float = 120) -> None:
    """Wait until a file exists. Raise TimeoutError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"there is no {file.name} after {seconds:g} s")
        time.sleep(0.02)


def kill_rank(rank: int, folder: str, epoch: int) -> None:
    """Kill a rank of the train.py that saves in `folder`, as soon as it has saved this epoch.

    Raise TimeoutError if it does not save it, and RuntimeError if the rank has ended before.
    """
    wait_for(Path(folder, f"{epoch - 1:04}", ".metadata"))
    victims = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if folder in (process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("RANK") == str(rank)
    ]
    wait_for(Path(folder, f"{epoch:04}", ".metadata"))
    try:
        min(victims, key=psutil.Process.create_time).kill()  # the later ones load its data
    except (ValueError, psutil.NoSuchProcess):  # none was found, or it has just ended
        raise RuntimeError(f"rank {rank} ended before it could be killed") from None


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples of a step, `(BATCH, FEATURES)`, and their targets, `(BATCH,)`.

    They are the same on every rank, in every attempt and at every world size.
    """
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=numbers)
    return inputs, inputs @ torch.arange(1.0, FEATURES + 1)


def save(folder: str, step: int, weights: torch.Tensor) -> None:
    """Write a checkpoint: under another name first, so that a kill never leaves half of one."""
    unfinished = Path(folder, "checkpoint.new")
    torch.save({"step": step, "weights": weights.cpu()}, unfinished)
    os.replace(unfinished, Path(folder, "checkpoint.pt"))


def load(folder: str) -> tuple[int, torch.Tensor]:
    """Return the next step and the weights. Only rank 0 reads the folder; it broadcasts both."""
    state = torch.zeros(1 + FEATURES)
    file = Path(folder, "checkpoint.pt")
    if dist.get_rank() == 0 and file.exists():
        kept = torch.load(file)
        state = torch.cat([torch.tensor([float(kept["step"])]), kept["weights"]])
    state = state.to(device())
    dist.broadcast(state, src=0)
    return int(state[0]), state[1:].clone()


def train(
    rank: int,
    world_size: int,
    folder: str,
    steps: int,
    dies: tuple[int, int] | None = None,
    pause: float = 0.0,
) -> tuple[int, list[float]]:
    """Train on a part of each batch; return the step at which this attempt began, and the weights.

    Rank 0 saves a checkpoint in `folder` after each step, and a line there for each attempt.
    dies: a rank and a step; in the first attempt this rank's process is killed before this step.
    pause: seconds between two steps while there is only one rank, so that others can join.
    """
    begun, weights = load(folder)
    if rank == 0:
        with Path(folder, ATTEMPTS).open("a") as attempts:
            attempts.write(f"from step {begun}: world size {world_size}\n")
    for step in range(begun, steps):
        if attempt() == 0 and dies == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = (part[rank::world_size].to(device()) for part in batch(step))
        gradient = 2 * inputs.T @ (inputs @ weights - targets)
        dist.all_reduce(gradient)
        weights -= LEARNING_RATE * gradient / BATCH
        if rank == 0:
            save(folder, step + 1, weights)
        dist.barrier()  # nobody continues before it is written
        time.sleep(pause if world_size == 1 else 0)
    return begun, weights.tolist()


def main(argv: list[str] | None = None) -> None:
    """Check each rank's numbers, compare interrupted with uninterrupted training, print one line.

    With --checkpoint it trains in that folder instead, resuming at each start until all is done.
    """
    parser = lesson_parser("torchrun", __doc__)
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="train, and save checkpoints in this folder"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=100,
        help="how many steps to train with --checkpoint (default 100)",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        help="seconds that a lone rank waits after each step (default 0)",
    )
    options = parser.parse_args(argv or [])
    if options.checkpoint is not None:
        with open_ranks(options.world_size, options.backend, options.trace) as ranks:
            Path(options.checkpoint).mkdir(parents=True, exist_ok=True)
            given = options.checkpoint, options.steps, None, options.pause
            begun, weights = ranks(train, *given)[0]
            ranks.say(f"torchrun: {ranks}, steps {begun} to {options.steps}: {weights}")
        return
    with (
        open_ranks(options.world_size, options.backend, options.trace) as ranks,
        tempfile.TemporaryDirectory() as whole,
        tempfile.TemporaryDirectory() as halves,
    ):
        for rank, info in enumerate(ranks(my_place)):
            prove("each rank finds its number", info["RANK"] == rank)
            prove("each rank finds the world size", info["WORLD_SIZE"] == ranks.world_size)
            if info["GROUP_RANK"] is not None:  # torchrun has started it
                first = info["GROUP_RANK"] * info["LOCAL_WORLD_SIZE"]
                prove("each host has consecutive ranks", rank == first + info["LOCAL_RANK"])
        at_once = list(ranks(train, whole, 6))
        first_half = list(ranks(train, halves, 3))
        second_half = list(ranks(train, halves, 6))
        prove("training resumes where it stopped", {begun for begun, _ in second_half} == {3})
        prove("half of the training is not all of it", first_half[0] != at_once[0])
        weights = [weights for _, weights in [*at_once, *second_half]]
        prove("nothing is lost: all weights are bit-equal", all(w == weights[0] for w in weights))
        ranks.say(f"torchrun: {ranks}, each knows its place, resumed training bit-equal")


if __name__ == "__main__":
    run_as_script(main)
