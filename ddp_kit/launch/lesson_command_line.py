"""The command line that all lessons share."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ddp_kit.comparison import Comparison
from ddp_kit.errors import KitError, PoolError, ProofError
from ddp_kit.pool.ipython import shell


def lesson_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every lesson: --world-size, --backend, --trace."""
    parser = _Parser(
        prog=f"python -m ddp_kit.lessons.{name}",
        description=description.split("\n\n")[0],
        epilog=f"Also: torchrun --standalone --nproc-per-node 4 -m ddp_kit.lessons.{name}",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        default=None,
        help="number of ranks to spawn (default 4; torchrun and mpiexec set their own)",
    )
    parser.add_argument(
        "--backend",
        default="auto",
        help='"gloo", "nccl", "cuda:gloo" (gloo on shared GPUs), "mpi", "shm", or "auto": nccl if '
        "every rank can have a GPU of its own, else gloo (default auto)",
    )
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help="write what the ranks communicate to this folder, for kit.load_trace; "
        "this replaces the traces of an earlier start",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises PoolError in a notebook, where an exit would fill a page."""

    def error(self, message: str) -> NoReturn:
        if shell() is not None:
            raise PoolError(f"{message}; --help lists the options")
        super().error(message)


def run_as_script(main: Callable[[list[str]], None]) -> None:
    """Call a lesson's main with the command line; print an error of the kit in one line.

    Ctrl-C ends the lesson and its ranks with one line and exit status 130, as shells expect.
    In a notebook, `%run -m` would then copy the names of the lesson over those that the learner's
    cells define; it does not after a SystemExit, which it takes for success without a status.
    """
    shown_by_notebook = shell() is not None
    if shown_by_notebook:  # %run -m adds that the failure is unknown
        warnings.filterwarnings("ignore", "Unknown failure executing module")
    try:
        main(sys.argv[1:])
    except KitError as error:
        if shown_by_notebook:
            raise  # %run shows it in one line already
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt as interrupt:
        if shown_by_notebook:
            raise
        lines = getattr(interrupt, "_render_traceback_", lambda: ["KeyboardInterrupt"])
        print(*lines(), sep="\n", file=sys.stderr)
        sys.exit(130)
    if shown_by_notebook:
        sys.exit()


def choose(name: str, value: Any, options: Mapping[str, Any]) -> Any:
    """Return what a choice stands for. Raises PoolError unless it is one of the options."""
    if value not in list(options):
        raise PoolError(f"{name} must be one of {', '.join(map(repr, options))}; got {value!r}")
    return options[value]


def prove(claim: str, holds: bool | Comparison) -> None:
    """Raise ProofError naming the claim, and what `kit.compare` found, unless it holds."""
    if not holds:
        found = f"\n{holds}" if isinstance(holds, Comparison) else ""
        raise ProofError(f"this did not hold: {claim}{found}")
