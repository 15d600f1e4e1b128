"""One side of a comparison: a script that bench.py starts and asks for one round at a time."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Measure = Callable[[], Iterator[Any]]  # the first item says "ready", each further one is a round


def seconds(call: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call(*args, **kwargs)
    return time.perf_counter() - began


def serve(measures: dict[str, Measure]) -> None:
    """Answer bench.py: one line of JSON when ready, and one for each line that it sends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # anything else that is printed here is not an answer
    rounds = measures[sys.argv[1]]()
    try:
        print(json.dumps(next(rounds)), file=answers)
        for _ in sys.stdin:
            print(json.dumps(next(rounds)), file=answers)
    finally:
        rounds.close()  # type: ignore[attr-defined]
