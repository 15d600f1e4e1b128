"""Graders of lesson 01: rings, ping-pong, three deadlocks to find and fix, and work to hand out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.check.compared import IN_MESSAGES, Used, called, compared, hunt, in_messages
from ddp_kit.check.grader import SENT, SIZES, brought, in_place
from ddp_kit.errors import DeadlockError
from ddp_kit.pool import Result
from ddp_kit.trace import Trace

BLOCKING = "with send and recv alone"
_FREE = 7  # the tag with which the grader's ranks let each other go on
_TASKS = 5, 3, 8, 1, 9, 2, 7, 4
_ANY = 4, -1, 0, 1, -7  # none of them can mean that there are no more


for _number, _name in (("1.a", "take_turns"), ("1.b", "immediate"), ("1.c", "exchange")):
    compared(_number, f"{_name}(rank, world_size)")(called)


@compared(
    "1.1",
    "ping_pong(counter, rounds)",
    "two messages a round",
    cases=[(n, rounds) for n in (2, 3, 5) for rounds in (1, 3)],
    call=lambda n, rounds: f"ping_pong(counter, rounds={rounds})",
    **IN_MESSAGES | {"sizes": (2, 3, 5)},
)
def _ping_pong(rank: int, n: int, ping_pong: Callable, rounds: int) -> torch.Tensor:
    return in_place(rank, n, ping_pong, [torch.tensor([100 * r]) for r in range(n)], rounds)


def _blocking(trace: Trace, *case: Any) -> list[Used]:
    others = {event.op for event in trace} - {"send", "recv"}
    calls = [Used(f"{op} was called {{}}", 1, "time", BLOCKING) for op in sorted(others)]
    return in_messages(trace) + calls


@compared(
    "1.2",
    "shift(tensor, distance)",
    "one message a rank",
    where="on 2, 3, 4 and 5 ranks, over every distance",
    cases=[(n, distance) for n in (2, 3, 4, 5) for distance in range(1, n)],
    on_failure={DeadlockError: "one ring hangs"},
    part=lambda pair: "every other distance" if pair[1] > 1 else "distance=1",
    call=lambda n, distance: f"shift(tensor, distance={distance})",
    **IN_MESSAGES | {"others": (SENT, BLOCKING), "used": _blocking},
)
def _shift(rank: int, n: int, shift: Callable, distance: int) -> dict:
    tensor = brought(n, 4)[rank]
    return {"what is returned": shift(tensor, distance), "tensor": tensor}


@compared(
    "1.3",
    "running_sum(tensor)",
    "one message from each rank but the last",
    **IN_MESSAGES,
)
def _running_sum(rank: int, n: int, running_sum: Callable) -> torch.Tensor:
    return in_place(rank, n, running_sum, brought(n, 3))


@compared(
    "1.4",
    "stream(items)",
    "also for an empty list",
    cases=[(n, *items) for n in SIZES for items in ((3, 1, 4), ())],
    call=lambda n, *items: f"stream({list(items)})",
    **IN_MESSAGES,
)
def _stream(rank: int, n: int, stream: Callable, *items: int) -> list[int]:
    return stream(None if rank else list(items))


hunt("1.5")


def _done_by_all(result: Result) -> list[Any]:
    done = sorted(task for value in result for task in value["done"])
    own = {"the tasks that are done": done, "those that rank 0 does": result[0]["done"]}
    return [{"what is returned": value["returned"]} | own for value in result]


def _messages(trace: Trace, *case: Any) -> list[Used]:
    sent = [message for message in trace.messages() if message.tag != _FREE]
    return [Used("{} were sent", len(sent), "message")]


@compared(
    "1.6",
    "distribute(tasks, work)",
    "each task done once, by whoever is free",
    kind="function",
    cases=[
        *((2, *_TASKS[:3]), (3, *_TASKS[:6]), (4, *_TASKS)),
        *((3, *_ANY), (4, *_ANY[:1]), (2,), (1, *_ANY)),
    ],
    part=lambda case: f"on {case[0]} ranks" if case[1:2] == _TASKS[:1] else "any tasks",
    call=lambda n, *tasks: f"distribute({list(tasks)}, work)",
    together=_done_by_all,
    **IN_MESSAGES | {"used": _messages, "sizes": (1, 2, 3, 4)},
)
def _work(rank: int, world_size: int, distribute: Callable, *tasks: int) -> dict[str, Any]:
    """Call an answer with a `work` in which all ranks but the last wait in their first task.

    They wait for the last one, which lets them go when only their tasks are left. No clock decides
    who is first, and if the last one never gets these tasks, that is a deadlock.
    """
    done: list[int] = []
    last, token, going = world_size - 1, torch.zeros(1), []
    stuck = list(range(1, last)) if len(tasks) >= last else []

    def let_go() -> None:
        going.extend(dist.isend(token, dst, tag=_FREE) for dst in stuck)
        stuck.clear()

    def work(task: int) -> int:
        done.append(task)
        if rank in stuck:
            stuck.clear()
            dist.recv(token, last, tag=_FREE)
        elif rank == last and len(done) == len(tasks) - len(stuck):
            let_go()
        return 3 - 2 * task

    returned = distribute(list(tasks) if rank == 0 else None, work)
    if rank == last:
        let_go()
    elif rank in stuck:  # it never got a task
        dist.recv(token, last, tag=_FREE)
    for each in going:
        each.wait()
    return {"done": done, "returned": returned}
