"""The command line that all lessons share."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

from ddp_kit.errors import KitError, PoolError, ProofError
from ddp_kit.pool.cells import shell


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
        help="how many ranks to spawn (default 4; under torchrun or mpiexec, what that started)",
    )
    parser.add_argument(
        "--backend",
        default="auto",
        help='"gloo", "nccl", "cuda:gloo" (gloo on shared GPUs), "mpi", or "auto": nccl where '
        "every rank can have a GPU, else gloo (default auto)",
    )
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help="write what the ranks communicate into this folder, for kit.load_trace; "
        "replaces the traces of an earlier start",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """In a notebook a wrong option is an error of the kit: an exit would fill a page there."""

    def error(self, message: str) -> NoReturn:
        if shell() is not None:
            raise PoolError(f"{message}; the option --help lists the others")
        super().error(message)


def run_as_script(main: Callable[[list[str]], None]) -> None:
    """Call a lesson's main with the command line; tell an error of the kit in one line.

    Ctrl-C ends the lesson and its ranks with a line and exit status 130, as shells have it.
    """
    shown_by_notebook = shell() is not None
    if shown_by_notebook:  # to an error that was shown, %run -m adds that the failure is unknown
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
        told = getattr(interrupt, "_render_traceback_", lambda: ["KeyboardInterrupt"])
        print(*told(), sep="\n", file=sys.stderr)
        sys.exit(130)


def prove(claim: str, holds: bool) -> None:
    """Raise ProofError naming the claim, unless it holds."""
    if not holds:
        raise ProofError(f"this did not hold: {claim}")
