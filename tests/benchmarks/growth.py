"""What grows with the number of ranks: one table, from 2 to 64."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import bench

RANKS = (2, 4, 8, 16, 32, 64)
TITLE = "growth with the number of ranks"
COLUMNS = {
    "start": "start and first result",
    "bare_start": "the same with mp.spawn",
    "warm": "warm call",
    "floor": "a word, all_reduce, a word back",
    "memory": "memory of a rank",
    "deadlock": "a deadlock is found",
    "events": "100,000 traced events",
    "smaller": "call on half of them",
}
ROUNDS = 3


def measure() -> dict[int, dict[str, Any] | str]:
    """Return the medians of some rounds for each number of ranks, or why there are none."""
    found: dict[int, dict[str, Any] | str] = {}
    for ranks in RANKS:
        rounds = []
        try:
            for number in range(ROUNDS):
                bench.say(f"{TITLE}: round {number + 1}, {ranks} ranks")
                values: dict[str, float] = {}
                for script in ("kit_side.py", "bare_side.py"):
                    side = bench.Side(script, script, f"growth {ranks}")
                    with bench.running(side, sys.executable) as process:
                        values |= process.round()
                rounds.append(values)
            found[ranks] = {key: statistics.median(one[key] for one in rounds) for key in COLUMNS}
        except bench.SideFailed as failed:
            found[ranks] = str(failed)
    bench.say("")
    return found


def table(found: dict[int, dict[str, Any] | str]) -> str:
    """Return the table in Markdown."""
    lines = [
        f"**{TITLE}** (goal: nothing grows faster than it; medians of {ROUNDS} pools)",
        "",
        f"| ranks | {' | '.join(COLUMNS.values())} |",
        f"|--:|{'--:|' * len(COLUMNS)}",
    ]
    for ranks, values in found.items():
        if isinstance(values, str):
            lines.append(f"| {ranks} | {values} |{' |' * (len(COLUMNS) - 1)}")
            continue
        cells = [
            f"{value / 1e6:.0f} MB" if key == "memory" else bench.shown(value)
            for key, value in values.items()
        ]
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
