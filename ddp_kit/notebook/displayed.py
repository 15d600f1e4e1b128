"""What ranks have displayed, below a heading with their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from IPython.display import display

from ddp_kit.error_text import name_ranks
from ddp_kit.pool.result import beside_rank
from ddp_kit.pool.wire.messages import Bundle


def show_displayed(displayed: Mapping[int, Sequence[Bundle]]) -> None:
    """Show it in rank order: text beside its heading, what looks the same on several ranks once."""
    ranks: dict[tuple[str, int], list[int]] = {}
    for rank, bundles in displayed.items():
        for look in _looks(bundles):
            ranks.setdefault(look, []).append(rank)
    for rank, bundles in displayed.items():
        for (data, metadata), look in zip(bundles, _looks(bundles), strict=True):
            if set(data) == {"text/plain"}:
                print(beside_rank(rank, str(data["text/plain"])))
            elif ranks[look][0] == rank:
                print(f"{_name_range(ranks[look])}:")
                display(data, metadata=metadata, raw=True)


def _looks(bundles: Sequence[Bundle]) -> Iterator[tuple[str, int]]:
    """Yield how each bundle looks, and how many up to it look so."""
    seen: Counter[str] = Counter()
    for data, _ in bundles:
        # The text of a figure or a table may contain an address.
        look = repr(sorted((kind, value) for kind, value in data.items() if kind != "text/plain"))
        seen[look] += 1
        yield look, seen[look]


def _name_range(ranks: Sequence[int]) -> str:
    """Return ascending ranks in words, three or more without a gap as a range."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"  # noqa: RUF001
    return name_ranks(ranks)
