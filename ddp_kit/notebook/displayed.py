"""What ranks have displayed, below a heading with their numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from IPython.display import display

from ddp_kit.error_text import name_ranks
from ddp_kit.pool.wire.messages import Bundle


def show_displayed(displayed: Mapping[int, Sequence[Bundle]]) -> None:
    """Show it in rank order: text beside its heading, and what several ranks displayed once."""
    shown: set[tuple[int, int]] = set()
    for rank, bundles in displayed.items():
        for at, bundle in enumerate(bundles):
            data, metadata = bundle
            if set(data) == {"text/plain"}:
                head = f"rank {rank}: "
                print(head + textwrap.indent(data["text/plain"], " " * len(head)).lstrip())
            elif (rank, at) not in shown:
                same = [r for r, others in displayed.items() if _is_same(bundle, others[at:])]
                shown |= {(other, at) for other in same}
                print(f"{_name_range(same)}:")
                display(data, metadata=metadata, raw=True)


def _is_same(bundle: Bundle, others: Sequence[Bundle]) -> bool:
    """Return whether the first of others looks the same. Its text may contain an address."""
    return bool(others) and _without_text(bundle) == _without_text(others[0])


def _without_text(bundle: Bundle) -> dict:
    return {kind: value for kind, value in bundle[0].items() if kind != "text/plain"}


def _name_range(ranks: Sequence[int]) -> str:
    """Return ascending ranks in words, three or more without a gap as a range."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"  # noqa: RUF001
    return name_ranks(ranks)
