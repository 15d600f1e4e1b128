"""The result of a run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddp_kit.errors import PoolError
from ddp_kit.pool.wire.payload import Payload
from ddp_kit.trace import Trace


@dataclass(frozen=True)
class Result:
    """What every rank of one run returned, printed and sent.

    result[2] is what rank 2 returned; `len(result)` is the world size; iterating goes in
    rank order. output[2] is all that rank 2 printed, as one str.
    """

    values: tuple[Any, ...]
    output: tuple[str, ...]
    trace: Trace = field(repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rank: int) -> Any:
        return self.values[rank]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        if all(value is None for value in self.values):
            return f"{len(self)} ranks returned None"
        lines = []
        for rank, value in enumerate(self.values):
            head = f"rank {rank}: "
            lines.append(head + textwrap.indent(repr(value), " " * len(head)).lstrip())
        return "\n".join(lines)


def unpack(rank: int, packed: Payload) -> Any:
    """Unpickle what a rank returned. Raise PoolError if the notebook cannot hold it."""
    try:
        return packed.unpack()
    except (Exception, SystemExit) as error:
        raise PoolError(
            f"what rank {rank} returned cannot be rebuilt in the notebook: "
            f"{type(error).__name__}: {str(error).rstrip('.')}; return tensors, numbers, lists or "
            "dicts, and of a model its state_dict()"
        ) from None
