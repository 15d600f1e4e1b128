"""The folder of `--trace`: a folder for each run of a lesson, in it a part for each rank.

traces/run-00-blocking/rank-0.jsonl
traces/run-00-blocking/rank-1.jsonl
traces/run-01-immediate/rank-0.jsonl
...
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ddp_kit.errors import TraceError
from ddp_kit.failures import name_ranks
from ddp_kit.trace.events import Trace
from ddp_kit.trace.rank_trace import (
    Clock,
    RankTrace,
    is_rank_trace,
    join_rank_traces,
    read_rank_trace,
)

_RUN = re.compile(r"run-(\d+)-(\w+)")
_PART = re.compile(r"rank-(\d+)\.jsonl")
_OURS = re.compile(r"rank-\d+\.jsonl|\.rank-\d+\.jsonl\.new")  # whole, or left by a killed rank
_SHOWN = 8  # runs that an error names


class TraceFolder:
    """Where a lesson writes the trace of each of its runs.

    path: the folder; it is made if missing.
    launch: what the parts of one start of the lesson share; set it where processes must agree.
    clock: of this process, compared with that of rank 0; None: it is the same clock.

    Raises OSError if the folder cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.launch = Path(path), uuid.uuid4().hex
        self.clock: Clock | None = None
        self._runs = 0
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass  # it can be written to

    def clear(self) -> None:
        """Remove the parts that an earlier start wrote, and nothing else.

        Raises TraceError for a file that has the name of a part and is none.
        """
        files = [file for _, _, path in _runs(self.path) for file in path.iterdir()]
        parts = [file for file in files if _OURS.fullmatch(file.name)]
        for part in parts:
            with suppress(FileNotFoundError):  # another host that shares the folder was faster
                if not is_rank_trace(part):
                    raise TraceError(f"{str(part)!r} is no part of a trace, and it is in the way")
        for part in parts:
            part.unlink(missing_ok=True)
        for path in {part.parent for part in parts}:
            with suppress(OSError):  # it holds something else
                path.rmdir()

    def write(self, worker: str, trace: Trace, ranks: Iterable[int]) -> None:
        """Write what `ranks` communicated in the next run, of `worker`. Raises OSError."""
        name = re.sub(r"\W", "", worker) or "worker"  # "<lambda>" has no place in a file's name
        path = self.path / f"run-{self._runs:02}-{name}"
        self._runs += 1
        path.mkdir(exist_ok=True)
        for rank in ranks:
            part = RankTrace.of(trace, rank, self.launch, self.clock)
            part.write(path / f"rank-{rank}.jsonl")


def load_trace(folder: str | os.PathLike[str], run: int | str = -1) -> Trace:
    """Put together what the ranks of a lesson wrote with `--trace folder`.

    folder: as given to the lesson. Where hosts do not share it, copy theirs into one first.
    run: which run of the lesson. A number as in the name of its folder, from 0; or from the
        end, as in a list; or a worker's name, for the last run of it. By default the last run.

    All times are those of rank 0's clock; `clock_error` of the trace tells how well they are
    known. Raises TraceError if there is no such run, if a rank's part of it is missing, and
    for a file that is no part.
    """
    try:
        path = _choose_run(Path(folder), run)
        parts = [read_rank_trace(part, rank) for rank, part in sorted(_parts(path).items())]
    except OSError as error:
        raise TraceError(f"cannot read {error.filename!r}: {error.strerror}") from error
    if len({(part.launch, part.world_size) for part in parts}) > 1:
        raise TraceError(
            f"the parts in {str(path)!r} are of different starts of a lesson; "
            "remove the folder and run the lesson again"
        )
    world_size = parts[0].world_size
    missing = set(range(world_size)).difference(part.rank for part in parts)
    if missing:
        verb = "part is" if len(missing) == 1 else "parts are"
        raise TraceError(
            f"{name_ranks(missing)}: the {verb} missing in {str(path)!r}; a rank that was killed "
            "has written none, and one on another host may have written it there"
        )
    return join_rank_traces(parts)


def _runs(folder: Path) -> Iterator[tuple[int, str, Path]]:
    """Give the number, the worker's name and the folder of each run, in no order."""
    for path in folder.iterdir():
        match = _RUN.fullmatch(path.name)
        if match and path.is_dir():
            yield int(match[1]), match[2], path


def _parts(path: Path) -> dict[int, Path]:
    """Return the parts in the folder of a run, by rank."""
    found = ((_PART.fullmatch(part.name), part) for part in path.iterdir())
    return {int(match[1]): part for match, part in found if match}


def _choose_run(folder: Path, run: int | str) -> Path:
    if not folder.is_dir():
        raise TraceError(
            f"there is no folder {str(folder)!r}; name the one that a lesson wrote with --trace"
        )
    runs = sorted(found for found in _runs(folder) if _parts(found[2]))
    if not runs:
        raise TraceError(f"there is no trace in {str(folder)!r}; a lesson writes one with --trace")
    if isinstance(run, int) and -len(runs) <= run < 0:
        return runs[run][2]
    chosen = [path for number, worker, path in runs if run in (number, worker)]
    if chosen:
        return chosen[-1]
    names = ", ".join(f"{number} {worker}" for number, worker, _ in runs[-_SHOWN:])
    last = ", of which these are the last" if len(runs) > _SHOWN else ""
    raise TraceError(
        f"there is no run {run!r} in {str(folder)!r}; it has {len(runs)}{last}: {names}"
    )
