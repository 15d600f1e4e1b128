"""The result of a run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddp_kit.errors import ResultError
from ddp_kit.trace import Trace

LONGEST_REPR = 1_500  # characters of a value, or of displayed text, that are shown


def beside_rank(rank: int, text: str) -> str:
    """Return a value's text beside the name of its rank; cut the text if it is long."""
    head = f"rank {rank}: "
    if len(text) > LONGEST_REPR:
        text = f"{text[:LONGEST_REPR]} ... and {len(text) - LONGEST_REPR:,} more characters"
    return head + textwrap.indent(text, " " * len(head)).removeprefix(" " * len(head))


@dataclass(frozen=True)
class Result:
    """What every rank of one run returned, printed and sent.

    result[2] is what rank 2 returned; `len(result)` is the world size; iterating goes in
    rank order. output[2] is what rank 2 printed, as one str. If that is more than 200,000 bytes, it
    has the first and the last 100,000, and between them a line that says how many are missing. The
    repr of a Result cuts long values, such as a state_dict.

    Indexing raises ResultError, which is an IndexError, for a rank that does not exist.
    """

    values: tuple[Any, ...]
    output: tuple[str, ...]
    trace: Trace = field(repr=False)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rank: int) -> Any:
        try:
            return self.values[rank]
        except (IndexError, TypeError):
            ranks = "rank 0" if len(self) == 1 else f"ranks 0 to {len(self) - 1}"
            raise ResultError(
                f"there is no rank {rank!r} in this result, which has {ranks}"
            ) from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __repr__(self) -> str:
        if all(value is None for value in self.values):
            return f"{len(self)} ranks returned None"
        lines = []
        for rank, value in enumerate(self.values):
            lines.append(beside_rank(rank, repr(value)))
        return "\n".join(lines)
