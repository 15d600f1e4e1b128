"""Operations in words, as a learner would have written them."""

from __future__ import annotations

from collections.abc import Iterable

from ddp_kit.failures import count, name_ranks
from ddp_kit.trace.events import Event, Shape, format_arguments


def called(event: Event, world: Iterable[int]) -> str:
    """Write an operation as it was called: "recv(src=1, tag=2)", "barrier".

    world: all ranks; a group is named when it has others.
    """
    given = format_arguments(event.method, event.peer, event.tag, event.root)
    if event.reduce_op not in (None, "SUM"):
        given.append(f"op={event.reduce_op}")
    if event.method == "new_group":
        given += [str(list(ranks)) for ranks in event.inputs]
    if event.splits:
        names = ("input_split_sizes", "output_split_sizes")
        given += [f"{name}={list(sizes)}" for name, sizes in zip(names, event.splits, strict=False)]
    if set(event.group.ranks) != set(world):
        given.append(f"group={list(event.group.ranks)}")
    return f"{event.op}({', '.join(given)})" if given else event.op


def called_with(event: Event, world: Iterable[int]) -> str:
    """Write an operation as it was called, and what tensors it was given."""
    on = f" on {event.device}" if event.device != "cpu" else ""
    if event.kind != "collective":
        of = f" of {event.dtype}" if event.dtype else ""
        return f"{called(event, world)} with {count(event.nbytes, 'byte')}{of}{on}"
    if event.method == "new_group" or not event.inputs + event.outputs:
        return called(event, world)
    given = event.inputs or event.outputs
    into = f" into {shapes(event.outputs)}" if event.inputs and event.outputs else ""
    of = f"{event.dtype} of " if event.dtype else ""
    return f"{called(event, world)} with {of}{shapes(given)}{into}{on}"


def shapes(many: tuple[Shape, ...]) -> str:
    """Write shapes: "shape (4,)", "shapes (4,) and (5,)", "3 times shape (4,)"."""
    if len(many) > 1 and len(set(many)) == 1:
        return f"{len(many)} times shape {many[0]}"
    return f"shape {many[0]}" if len(many) == 1 else f"shapes {', '.join(map(str, many))}"


def ordinal(number: int) -> str:
    """Write which one of many: "1st", "12th", "23rd"."""
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number:,}{({1: 'st', 2: 'nd', 3: 'rd'}).get(last, 'th')}"


def whose(ranks: Iterable[int], verb: str) -> str:
    """Write who does something: "rank 0 waits", "ranks 0 and 1 wait"; `verb` is the plural."""
    ranks = tuple(ranks)
    return f"{name_ranks(ranks)} {verb}{'s' if len(ranks) == 1 else ''}"
