"""Graders of lesson 01: rings, ping-pong, three deadlocks to find and fix, and work to hand out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_kit.check.compared import called, compared, hunt
from ddp_kit.check.grader import SENT, UNCHANGED, Grader, brought, exercise, in_place, same
from ddp_kit.errors import DeadlockError

BLOCKING = "with send and recv alone"
_FREE = 7  # the tag with which the grader's ranks let each other go on
_TASKS = [5, 3, 8, 1, 9, 2, 7, 4]
_ANY = [4, -1, 0, 1, -7]  # none of them can mean that there are no more


for _number, _name in (("1.a", "take_turns"), ("1.b", "immediate"), ("1.c", "exchange")):
    compared(_number, f"{_name}(rank, world_size)")(called)


@exercise(
    "1.1",
    "ping_pong(counter, rounds)",
    "two messages a round",
    where="on 2, 3 and 5 ranks",
    collectives=False,
    cases=(2, 3, 5),
    others=(SENT,),
)
def _ping_pong(grader: Grader, world_size: int) -> None:
    for rounds in (1, 3):
        held = [torch.tensor([100 * rank]) for rank in range(world_size)]
        case = f"ping_pong(counter, rounds={rounds})"
        result = grader.run(in_place, held, rounds, world_size=world_size, case=case)
        wanted = [torch.tensor([2 * rounds]), torch.tensor([2 * rounds - 1]), *held[2:]]
        first_came = [torch.tensor([1]), torch.tensor([0])]  # what the first message brought
        unadded = same(first_came, list(result.values[:2]))
        grader.compare(wanted, result, {"nothing added": unadded, "wrong count": True})
        grader.check_total_sent(2 * rounds, 16 * rounds, "too many messages")


@exercise(
    "1.2",
    "shift(tensor, distance)",
    "one message a rank",
    where="on 2, 3, 4 and 5 ranks, over every distance",
    collectives=False,
    cases=[(n, distance) for n in (2, 3, 4, 5) for distance in range(1, n)],
    others=(SENT, BLOCKING),
    on_failure={DeadlockError: "one ring hangs"},
    part=lambda pair: "every other distance" if pair[1] > 1 else "distance=1",
)
def _shift(grader: Grader, world_size: int, distance: int) -> None:
    held = brought(world_size, 4)
    given, case = (held, distance), f"shift(tensor, distance={distance})"
    result = grader.run(_returned_and_held, *given, world_size=world_size, case=case)
    wanted = [held[(rank - distance) % world_size] for rank in range(world_size)]
    grader.compare(wanted, [returned for returned, _ in result], "other way round", verb="return")
    grader.compare(held, [kept for _, kept in result], "overwritten")
    grader.check_total_sent(world_size, 16 * world_size, "too many messages")
    if started := {event.op for event in result.trace} - {"send", "recv"}:
        fact = f"right, but {', '.join(sorted(started))} was called"
        grader.fail(fact, hint="not blocking", part=BLOCKING)


def _returned_and_held(
    rank: int, world_size: int, shift: Callable, held: list, distance: int
) -> tuple:
    return shift(held[rank], distance), held[rank]


@exercise(
    "1.3",
    "running_sum(tensor)",
    "one message from each rank but the last",
    collectives=False,
    others=(SENT,),
)
def _running_sum(grader: Grader, world_size: int) -> None:
    held = brought(world_size, 3)
    result = grader.run(in_place, held, world_size=world_size)
    wanted = [sum(held[1 : rank + 1], held[0]) for rank in range(world_size)]
    unset = any(torch.isnan(tensor).any() for tensor in result)
    mistakes = {UNCHANGED: held, "not received": unset, "not a running sum": True}
    grader.compare(wanted, result, mistakes)
    grader.check_total_sent(world_size - 1, 12 * (world_size - 1), "too many messages")


@exercise("1.4", "stream(items)", "also for an empty list", collectives=False, others=(SENT,))
def _stream(grader: Grader, world_size: int) -> None:
    for items in ([3, 1, 4], []):
        given = [(items,), *[(None,)] * (world_size - 1)]
        found = grader.call(given, f"stream({items})")
        grader.compare([items] * world_size, found, "wrong items", verb="return")
        messages = (len(items) + 1) * (world_size - 1)
        grader.check_total_sent(messages, 8 * messages, "too many messages")


hunt("1.5")


@exercise(
    "1.6",
    "distribute(tasks, work)",
    "each task done once, by whoever is free",
    kind="function",
    collectives=False,
    cases=[
        *((2, _TASKS[:3]), (3, _TASKS[:6]), (4, _TASKS)),
        *((3, _ANY), (4, _ANY[:1]), (2, []), (1, _ANY)),
    ],
    others=(SENT,),
    part=lambda case: f"on {case[0]} ranks" if case[1][:1] == _TASKS[:1] else "any tasks",
    where="on 1, 2, 3 and 4 ranks",
)
def _distribute(grader: Grader, world_size: int, tasks: list[int]) -> None:
    result = grader.run(
        _work,
        tasks,
        world_size=world_size,
        case=f"distribute({tasks}, work)",
        failed=partial(_behind, tasks),
    )
    done = sorted(task for value in result for task in value["done"])
    if done != sorted(tasks):
        fact = f"the tasks {sorted(tasks)} should be done once, but those that were done are {done}"
        grader.fail(fact, hint="not once")
    if world_size > 1 and result[0]["done"]:
        grader.fail("rank 0 has done tasks itself", hint="rank 0 works")
    wanted = [[_result_of(task) for task in tasks], *[None] * (world_size - 1)]
    found = [value["returned"] for value in result]
    arrived = isinstance(found[0], list) and sorted(found[0], key=str) == sorted(wanted[0], key=str)
    mistakes = {"as they arrived": arrived and found[0] != wanted[0], "other results": True}
    grader.compare(wanted, found, mistakes, verb="return")
    sent = [message for message in result.trace.messages() if message.tag != _FREE]
    most = 2 * len(tasks) + 2 * (world_size - 1)
    grader.check_at_most("", len(sent), most, "message", "too many messages")


def _result_of(task: int) -> int:
    return 3 - 2 * task


def _work(rank: int, world_size: int, distribute: Callable, tasks: list[int]) -> dict[str, Any]:
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
        return _result_of(task)

    returned = distribute(list(tasks) if rank == 0 else None, work)
    if rank == last:
        let_go()
    elif rank in stuck:  # it never got a task
        dist.recv(token, last, tag=_FREE)
    for each in going:
        each.wait()
    return {"done": done, "returned": returned}


def _behind(tasks: list[int], error: Exception) -> str:
    if type(error) is not DeadlockError:
        return ""
    if f"tag={_FREE}" in str(error):
        return "waits for the slowest"
    return "no end" if tasks == _TASKS[: len(tasks)] else "taken for the end"
