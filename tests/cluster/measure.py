"""Measure all_reduce between two hosts on a shaped link, beside what the model predicts.

    python tests/cluster/measure.py [RATE]

RATE is 100mbit if left out. It needs root and about 30 s; README.md has a record.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hosts import Host, missing, two_hosts
from torchrun import Torchrun

from ddp_kit.model import chunked_ring, fit, naive_ring

TIMING = str(Path(__file__).with_name("timing.py"))
SIZES = (250_000, 500_000, 1_000_000, 2_500_000)  # bytes
MODELS = {
    "whole ring": naive_ring,
    "chunked ring": chunked_ring,
    "preposted ring": chunked_ring,
    "built-in all_reduce": chunked_ring,  # gloo's own ring of segments
}


def times(
    hosts: Sequence[Host], folder: Path, per_host: int, rounds: int, sizes: Sequence[int]
) -> dict[str, dict]:
    """Return what timing.py measures with `per_host` ranks on each host."""
    folder.mkdir(exist_ok=True)
    program = [TIMING, str(folder / "times.json"), str(rounds), *map(str, sizes)]
    run = Torchrun(hosts, folder / "output", *program, per_host=per_host)
    if run.wait(120) != [0, 0]:
        raise RuntimeError("\n".join(run.printed("err")))
    return json.loads((folder / "times.json").read_text())


def main(rate: str = "100mbit") -> None:
    """Print the tables."""
    reason = missing()
    if reason:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        for host in hosts:
            host.shape(rate)
        found = {n: times(hosts, Path(folder, str(n)), n // 2, 5, SIZES) for n in (2, 4)}
    messages = found[2]["messages"]
    alpha, beta = fit(messages)
    prices = f"alpha = {1e6 * alpha:,.0f} µs, beta = {1e9 * beta:.3f} ns a byte"
    print(f"A message across the link, {rate} each way: {prices}\n")
    for nbytes, seconds in messages:
        off = 100 * (seconds / (alpha + nbytes * beta) - 1)
        print(f"    {nbytes:>9,} bytes {1000 * seconds:8.2f} ms, {off:+.1f} % off the line")
    for n, both in found.items():
        print(f"\n**{n} ranks, {n // 2} on each host**\n")
        print("| | bytes | predicted | measured | |\n|---|--:|--:|--:|--:|")
        for name, model in MODELS.items():
            for nbytes, seconds in both["rings"][name]:
                predicted = model(n, nbytes, alpha, beta)
                print(
                    f"| {name} | {nbytes:,} | {1000 * predicted:.1f} ms | {1000 * seconds:.1f} ms "
                    f"| {100 * (seconds / predicted - 1):+.0f} % |"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
