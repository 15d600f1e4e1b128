"""Random programs on real ranks: the kit stops exactly those that never end in the reference."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from reference_executor import Machine, Tape, random_program

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROGRAMS = int(os.environ.get("DDP_KIT_RANDOM_PROGRAMS", "200"))  # of `make long`
WORLD_SIZE = 4
NEEDS_FUTEX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has futexes")
DEADLOCKS = 8  # of 200 programs: each costs fresh ranks


def obey(rank, world_size, program):
    groups, tensor, started = {}, torch.zeros(1), []
    for group in sorted({step[-1] for steps in program for step in steps if step[0] != "wait"}):
        groups[group] = None if group[0] == "world" else dist.new_group(group[1])
    for name, *given in program[rank]:
        if name == "wait":
            if given[0] < len(started) and started[given[0]]:
                started[given[0]].wait()
                started[given[0]] = None  # gloo never ends a second wait for a message
        elif name.endswith("collective"):
            root, group = given
            how = {"group": groups[group], "async_op": name.startswith("i")}
            if root is None:
                work = dist.all_reduce(tensor.clone(), **how)
            else:
                work = dist.broadcast(tensor.clone(), root, **how)
            started += [work] if work else []
        else:
            peer, tag, group = given
            work = getattr(dist, name)(tensor.clone(), peer, tag=tag, group=groups[group])
            started += [work] if name.startswith("i") else []


def plain(program):
    """Write groups as tuples: the ranks need no class of the tests."""
    return [
        [
            step if step[0] == "wait" else (*step[:-1], (step[-1].name, step[-1].ranks))
            for step in own
        ]
        for own in program
    ]


def outcome(program, chance):
    """Return how a program ends in the reference; None if that depends on the order."""
    found = set()
    for _ in range(8):
        machine = Machine(program)
        while runnable := machine.runnable():
            machine.step(chance.choice(runnable))
        ended = all(map(machine.has_returned, range(WORLD_SIZE)))
        roots = [{op.event.root for op in joined.values()} for joined in machine.joined.values()]
        agreed = all(len(root) == 1 for root in roots)
        found.add("ended" if ended and agreed else "DeadlockError" if agreed else "MismatchError")
    return found.pop() if len(found) == 1 else None


def random_programs(chance, number):
    """Yield programs, each with how it ends. number: of those that end."""
    left = Counter({"ended": number, "DeadlockError": number * DEADLOCKS // 200})
    while sum(left.values()) > left["DeadlockError"]:
        program = random_program(Tape(chance.randbytes(110)), "cpu:gloo")
        if len(program) != WORLD_SIZE:
            continue
        for steps in program:  # a message whose work is dropped may be lost: keep it and wait
            started = sum(step[0].startswith("i") for step in steps)
            steps += [("wait", n) for n in range(started)]
        expected = outcome(program, chance)
        if expected and left[expected] > 0:
            left[expected] -= 1
            yield program, expected


@pytest.mark.parametrize(
    ("seed", "number", "backend"),
    [
        (2, 40, "gloo"),
        pytest.param(3, PROGRAMS, "gloo", marks=pytest.mark.long),
        pytest.param(4, PROGRAMS, "shm", marks=[pytest.mark.long, NEEDS_FUTEX]),
    ],
)
def test_a_program_on_real_ranks_is_judged_differently_from_the_reference(seed, number, backend):
    seen = Counter()
    for program, expected in random_programs(random.Random(seed), number):
        try:
            kit.run(obey, plain(program), world_size=WORLD_SIZE, timeout=60, backend=backend)
            verdict = "ended"
        except kit.KitError as error:
            verdict = type(error).__name__
        assert verdict == expected, (program, seen)
        seen[verdict] += 1
    assert seen["ended"] >= number
    assert seen["DeadlockError"] >= number * DEADLOCKS // 200
