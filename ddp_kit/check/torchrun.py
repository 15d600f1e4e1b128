"""Graders of lesson 11: torchrun's variables, a checkpoint to resume from, ranks of a host."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from io import BytesIO
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import alone, compared, hunt, in_parts
from ddp_kit.check.grader import (
    SIZES,
    by_size,
    name_counts,
    only,
    open_store,
    shared_folder,
)
from ddp_kit.check.init_methods import ScriptedStore, come_by_turns
from ddp_kit.errors import DeadlockError, MismatchError, RankError

PLACES = ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1))  # host and local rank of each rank in 11.1
LOCAL_SIZES = (2, 1, 4, 3, 2)  # how many ranks each host has in 11.3


@compared(
    "11.1",
    "my_place(gpus)",
    "with GPUs and without",
    sizes=SIZES,
    spare=None,
    cases=[(n, gpus) for n in (4, *SIZES) for gpus in (2, 0)],
    part=lambda case: "with GPUs" if case[1] else "without GPUs",
    call=lambda n, gpus: f"my_place({gpus})",
)
def _my_place(rank: int, world_size: int, my_place: Callable, gpus: int) -> Any:
    host, local_rank = PLACES[rank]
    hosts = [each for each, _ in PLACES[:world_size]]
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": host,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": hosts.count(host),
    }
    with patch.dict(os.environ, {name: str(number) for name, number in numbers.items()}):
        return my_place(gpus)


NEXT = "the next step"
NO_FILE = {"rank 0 raised FileNotFoundError": "no file", "FileNotFoundError": "rank 0 only"}


@compared(
    "11.2",
    "resume(folder, weights)",
    "with a checkpoint and without",
    on_failure=dict.fromkeys((DeadlockError, MismatchError), "rank 0 only") | {RankError: NO_FILE},
    **in_parts(NEXT),
)
def _resume(rank: int, n: int, resume: Callable, part: str) -> dict[str, Any]:
    found = {}
    for step, name in ((3, "with a checkpoint"), (None, "without a checkpoint")):
        weights = torch.full((3,), rank + 1.0)  # without a checkpoint they stay
        saved = {"step": step, "weights": torch.tensor([5.0, 6.0, 7.0])}
        with shared_folder(rank) as folder, tempfile.TemporaryDirectory() as empty:
            if step and rank == 0:
                torch.save(saved, folder / "checkpoint.pt")
            returned = resume(str(folder) if rank == 0 else empty, weights)
        found |= {f"the step {name}": returned} if part else {f"weights {name}": weights}
    return found


@compared(
    "11.3",
    "ranks_here(store, host, local_world_size)",
    where="on 1, 2, 3, 4 and 5 hosts with 1 to 4 ranks each",
    on_failure={
        RankError: {
            "incompatible function arguments": "no string",
            "'bytes'": "bytes added",
            "": "not set",
        }
    },
    sizes=SIZES,
    part=by_size(SIZES, "host"),
    spare=None,
)
def _ranks_here(rank: int, n: int, ranks_here: Callable) -> Any:
    with shared_folder(rank) as folder:
        return ranks_here(open_store(folder, n), rank, LOCAL_SIZES[rank])


hunt("11.9")


@alone("11.a", "take_number(store, hosts)")
def _take_number(take_number: Callable) -> dict:
    found = {}
    for hosts in (3, 2):
        store, arrivals = ScriptedStore(), count()

        def come(store: Any = store, arrivals: Any = arrivals, hosts: int = hosts) -> tuple:
            return next(arrivals), take_number(store, hosts)

        *gone_on, numbers = come_by_turns(store, hosts, come)
        came = f"when {name_counts(range(1, hosts + 1))} have come"
        found[f"the hosts that have gone on {came}"] = [len(each) for each in gone_on]
        in_order = [number for _, number in sorted(numbers, key=lambda pair: pair[0])]
        found[f"the numbers of {hosts} hosts, as they came"] = in_order
        taken = {"done", "all done"} & store.held.keys()
        found[f"keys of the next cell, with {hosts} hosts"] = sorted(taken)
    return found


class Killed(BaseException):
    """Stands for a kill: what an answer does not expect, and no `except Exception` catches."""


def _die(*_args: Any, **_named: Any) -> None:
    raise Killed


def _save_and_die(finishes: bool) -> Callable:
    """Return a `torch.save` that ends with a kill: when it has finished, or in the middle."""
    real = torch.save

    def save(value: Any, file: Any, *args: Any, **named: Any) -> None:
        buffer = BytesIO()
        real(value, buffer, *args, **named)
        whole = buffer.getvalue()
        part = whole if finishes else whole[: len(whole) // 2]
        if hasattr(file, "write"):
            file.write(part)
        else:
            Path(file).write_bytes(part)
        raise Killed

    return save


def _read(file: Any) -> Any:
    """Return what is in a checkpoint, or why it cannot be read."""
    try:
        found = torch.load(file)
        return dict(found) if isinstance(found, dict) else found
    except FileNotFoundError:
        return "no such file"
    except Exception:
        return "it cannot be read"


@alone("11.b", "save(folder, step, weights)")
def _save(save: Callable) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint.pt")
        save(folder, 3, torch.tensor([1.0, 2.0]))
        found = {"checkpoint.pt": _read(file)}
        found["the count of files"] = len(list(Path(folder).iterdir()))
        with file.open("rb") as opened:
            save(folder, 4, torch.tensor([2.0, 3.0]))
            found["checkpoint.pt for one who had opened it before"] = _read(opened)
        found["the next checkpoint.pt"] = _read(file)
        with patch("torch.save", _save_and_die(finishes=False)), suppress(Killed):
            save(folder, 5, torch.tensor([3.0, 4.0]))
        found["checkpoint.pt after a kill"] = _read(file)
        with patch.multiple(os, rename=_die, replace=_die), suppress(Killed):
            save(folder, 5, torch.tensor([3.0, 4.0]))
        # Before Python 3.11, Path's methods are not stopped here, and the new one is there.
        whole = isinstance(left := _read(file), dict) and left.get("step") in (4, 5)
        found["whether one is there after a kill before a rename"] = whole
        kills = {
            name: Mock(wraps=getattr(os, name), side_effect=chain([DEFAULT], repeat(Killed)))
            for name in ("rename", "replace")
        }
        with patch.multiple(os, **kills), suppress(Killed):
            save(folder, 5, torch.tensor([3.0, 4.0]))
        whole = isinstance(_read(file), dict)
        return found | {"whether one is there after a kill before a second rename": whole}


@compared("11.c", "train_tiny(rank, world_size, folder, steps)")
def _train_tiny(rank: int, world_size: int, train_tiny: Callable) -> dict:
    batch, save, saved = train_tiny.__globals__["batch"], torch.save, []
    length = 23  # no number of ranks divides it

    def own_examples(step: int, *args: Any) -> tuple:
        return tuple(only(slice(rank, None, world_size), batch(step, *(args or (length,))), 10.0))

    def noted(value: Any, *args: Any, **named: Any) -> None:
        saved.append(value["step"])
        time.sleep(0.2 if rank == 0 and value["step"] == 3 else 0)
        save(value, *args, **named)

    own = patch.dict(train_tiny.__globals__, batch=own_examples)
    with shared_folder(rank) as folder, own, patch("torch.save", noted):
        _, first = train_tiny(rank, world_size, folder, 3)
        written = _read(Path(folder, "checkpoint.pt"))
        dist.barrier()
        begun, second = train_tiny(rank, world_size, folder, 6)
    return {
        "the steps with which a checkpoint was saved": saved,
        "the weights after 3 steps": first,
        "checkpoint.pt after 3 steps": written,
        "the step at which the second run begins": begun,
        "the weights after 6 steps": second,
    }


@compared("11.d", "any_broken(loss)", spare=None)
def _any_broken(rank: int, world_size: int, any_broken: Callable) -> dict:
    found = {}
    cases = {"no rank": (), "one rank": (world_size - 1,), "every rank": range(world_size)}
    for who, broken in cases.items():
        for value in (math.nan, math.inf, -math.inf):
            weight = torch.tensor(value if rank in broken else rank + 1.0, requires_grad=True)
            loss = 2 * weight
            answer = any_broken(loss)
            answer = answer.item() if isinstance(answer, torch.Tensor) else answer
            found[f"the answer when {who} has {value}"] = answer
            found[f"the loss when {who} has {value}"] = str(loss.item())
    return found


STEPS, EVERY = 10, 3


@compared("11.10", "survive(folder, steps, every, model, optimizer, take_step)", kind="function")
def _survive(rank: int, world_size: int, survive: Callable) -> dict:
    found: dict[str, Any] = {}
    for name, kills in {
        "without a kill": (),
        "with a kill in step 7": ("step",),
        "with a kill while step 6 is saved": ("save",),
        "with both": ("save", "step"),
    }.items():
        with shared_folder(rank) as folder:
            for attempt, kill in enumerate((*kills, None)):
                taken: list[int] = []
                early: list[int] = []
                try:
                    losses, weights = _attempt(rank, survive, folder, attempt, kill, taken, early)
                except Killed:
                    dist.barrier()
        found[f"the steps {name}"] = taken
        if not kills:
            found["the steps that began while `latest` named a file that was missing"] = early
        found[f"the losses {name}"] = losses
        found[f"the weights {name}"] = weights
    return found


def _save_late(save: Callable, rank: int, *args: Any, **named: Any) -> None:
    time.sleep(0.05 * rank)
    save(*args, **named)


def _attempt(
    rank: int,
    survive: Callable,
    folder: Path,
    attempt: int,
    kill: str | None,
    taken: list[int],
    early: list[int],
) -> tuple[Any, torch.Tensor]:
    """Train with an answer; return the losses and weights. kill: in a "step", or in a "save".

    attempt: makes all that is not in a snapshot differ. taken: gets the steps that are taken.
    early: gets those that rank 0 takes while `latest` names a file that is not there yet.
    """
    torch.manual_seed(100 * attempt)  # the same weights on all ranks
    model = nn.Linear(3, 1)
    torch.manual_seed(100 * attempt + rank + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)

    def take_step(step: int) -> float:
        if (kill == "step" and step == 7) or (kill == "save" and step > 5):
            raise Killed
        taken.append(step)
        if rank == 0 and (folder / "latest").exists():
            named = int((folder / "latest").read_text())
            files = [folder / f"{named}-{one}.pt" for one in range(dist.get_world_size())]
            early.extend([step] * (not all(file.exists() for file in files)))
        optimizer.zero_grad()
        inputs = torch.randint(-2, 3, (4, 3)).float() + step
        loss = (model(inputs) - 1).square().mean() / 64
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if kill == "save" and step == 5:
            saving.__enter__()
        return loss.item()

    # Rank 0 has finished its file when all are killed; the others are in the middle.
    saving = patch("torch.save", _save_and_die(finishes=rank == 0))
    late = partial(_save_late, torch.save, rank)
    try:
        with nullcontext() if kill or attempt else patch("torch.save", late):
            losses = survive(folder, STEPS, EVERY, model, optimizer, take_step)
    finally:
        if kill == "save":
            with suppress(RuntimeError):  # it was never entered
                saving.__exit__(None, None, None)
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
