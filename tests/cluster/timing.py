"""Times on a shaped link: `torchrun timing.py FILE ROUNDS BYTES...` writes them to FILE as JSON.

"rings": what lesson 04 measures, by contestant; "messages": what lesson 10 measures of a message
between ranks 0 and 1. Both are pairs of bytes and seconds.
"""

import json
import sys
from pathlib import Path
from statistics import median

from ddp_kit.lessons import backends, ring_allreduce
from ddp_kit.lessons._launch import open_ranks

file, rounds, *sizes = sys.argv[1:]
sizes = tuple(map(int, sizes))
with open_ranks() as ranks:
    trips = backends.samples(ranks, backends.there_and_back, sizes)
    messages = [(nbytes, median(seconds) / 2) for nbytes, seconds in trips]
    rings = {
        name: [(nbytes, median(seconds)) for nbytes, seconds in points]
        for name, points in ring_allreduce.samples(ranks, sizes, int(rounds)).items()
    }
    Path(file).write_text(json.dumps({"rings": rings, "messages": messages}))
