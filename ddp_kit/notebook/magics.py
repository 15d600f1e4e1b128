"""`%%ranks`: a cell that runs on every rank. `%ranks`: the names that such cells have left."""

from __future__ import annotations

import io
import re
import sys
import tokenize
import traceback
import types
import warnings
from dataclasses import replace
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ddp_kit import pool, settings
from ddp_kit.error_hints import hint_for
from ddp_kit.error_text import name_ranks
from ddp_kit.errors import BackendError, DeadlockError, PoolError, RankError, RunError
from ddp_kit.notebook import debugger, rank_session
from ddp_kit.pool import Result, arguments, launcher_of
from ddp_kit.pool.wire import pickling
from ddp_kit.progress_file import RANKS_CELL, recording

_MAGIC = re.compile(r"\s*(%%?|!!?)(?P<name>\w\S*)|\s*[\w.]+\?+\s*$")

_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")

_SIZE_HELP = f"number of ranks; default {settings.WORLD_SIZE}, or as before"
RESULT = "_ranks"  # the notebook's name for the result of the last `%%ranks` cell, or its error


@magics_class
class RanksMagics(Magics):
    """The two magics, and their state between cells."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._forget()

    def _forget(self) -> None:
        self._world_size, self._backend = settings.WORLD_SIZE, "auto"
        self._had: dict[str, frozenset[int]] = {}  # ranks on which a cell has run, by launcher

    @magic_arguments("%ranks")
    @argument("-n", "--world-size", type=int, help=_SIZE_HELP)
    @argument("--only", metavar="0,2", help="run the cell on these ranks only")
    @argument("--timeout", type=float, help="seconds for the cell to end on every rank")
    @argument(
        "--backend",
        help='"gloo", "nccl", "cuda:gloo", "mpi", "shm" or "auto"; default "auto", or as before',
    )
    @cell_magic("ranks")
    def run_cell(self, line: str, body: str) -> None:
        """Run this cell on every rank, and show what each prints and what its last line gives.

        Names stay on each rank from cell to cell, until `%ranks reset`. `rank`, `world_size`,
        `torch`, `dist`, `kit` and `display` are defined. Random numbers of Python, NumPy and torch
        continue; everything else is as at the start of `kit.run`. `_ranks` is the result.

        A name is lost with its process: when a rank died, was stuck, or was restarted. Groups and
        DDP models become unusable when the ranks form another group, as with another -n. If a cell
        raises, what it has printed and displayed before is shown.
        """
        arguments = self._parse(line)
        size = self._world_size if arguments.world_size is None else arguments.world_size
        pool.check_world_size(size)
        backend = arguments.backend or self._backend
        only = _parse_only(arguments.only, size)
        source, file = self._name_source(body)
        quiet = _check(source, file)
        cell = rank_session.Cell(source, file, only, quiet, self._with_names(backend))
        with recording(RANKS_CELL):
            try:
                result = self._run(cell, size, backend, only, arguments.timeout)
            except RunError as error:
                self.shell.user_ns[RESULT] = error
                if isinstance(error, DeadlockError) and _left_out(error, only):
                    error.hint = "--only leaves out ranks: let all that communicate run the cell."
                if isinstance(error, RankError):
                    error.hint = self._hint_for_name(error) or error.hint
                raise
        values = (v.open() if isinstance(v, rank_session.SealedValue) else v for v in result)
        self.shell.user_ns[RESULT] = replace(result, values=tuple(values))

    def _hint_for_name(self, error: RankError) -> str:
        """Return how to pass a name that a rank lacks and the notebook has; "" for other errors."""
        for failure in error.failures.values():
            missing = failure.type == "NameError" and _NOT_DEFINED.match(failure.message)
            names = self.shell.user_ns.keys() - self.shell.user_ns_hidden.keys()
            if missing and (name := missing[1]) in names:
                is_module = isinstance(self.shell.user_ns[name], types.ModuleType)
                do = "import it in a %%ranks cell" if is_module else ""
                do = do or f"copy it with %ranks push {name}"
                return f"{name} is defined in the notebook, but not on the ranks: {do}."
        return ""

    @line_magic("ranks")
    def manage(self, line: str) -> None:
        """Manage the names that `%%ranks` cells have left on the ranks.

            %ranks                  list the names
            %ranks pull NAME ...    set NAME here to a list of the ranks' values, in rank order
            %ranks push NAME ...    copy NAME from here to the ranks
            %ranks reset            forget all names, and the -n and --backend of earlier cells
            %ranks debug [RANK]     look at the variables of a rank that raised in the last failed
                                    run, with the commands of pdb

        `%ranks debug` asks for commands, such as `p loss`; `help` lists them. They may also follow
        it: `%ranks debug 1 where ;; p loss`. They see values as they were when the rank raised, up
        to 1 MB a function, and a summary of those that are larger or not plain data. This works for
        `kit.run`, too.
        """
        what, *names = line.split() or ["names"]
        if what == "debug":
            debugger.debug(line.strip().removeprefix("debug"))
            return
        if what in ("pull", "push"):
            if not names or not all(map(str.isidentifier, names)):
                raise PoolError(f"%ranks {what} needs names, as in: %ranks {what} loss")
            (self._pull if what == "pull" else self._push)(tuple(names))
        elif what in ("names", "reset") and not names:
            (self._print_names if what == "names" else self._reset)()
        else:
            raise PoolError(
                f"%ranks does not know {line.strip()!r}; use pull NAME, push NAME, reset or "
                "debug RANK"
            )

    def _parse(self, line: str) -> Any:
        try:
            return parse_argstring(RanksMagics.run_cell, line)
        except UsageError as error:  # IPython prints a line to stderr, which is no error for nbval
            raise PoolError(f"%%ranks: {error}; %%ranks? lists its options") from None

    def _name_source(self, body: str) -> tuple[str, str]:
        """Return the body at its lines in the cell, and the name of the cell's file."""
        parent = self.shell.get_parent() if hasattr(self.shell, "get_parent") else {}
        whole = parent.get("content", {}).get("code", "")
        begun = whole.rfind(body.rstrip())  # %%time may stand above
        above = whole[:begun].count("\n") if begun > 0 else 1
        source, compiler = "\n" * above + body, self.shell.compile
        # The shell has counted this cell already; the name it made last has the number that is
        # shown, unless the kernel has named the same text before.
        named = getattr(compiler, "_filename_map", None) or {"": self.shell.execution_count}
        own = compiler.get_code_name(whole, whole, self.shell.execution_count)
        number = named.get(own, list(named.values())[-1])
        return source, compiler.cache(source, number, source)

    def _run(
        self,
        worker: Any,
        size: int,
        backend: str,
        only: tuple[int, ...] | None = None,
        timeout: float | None = None,
    ) -> Result:
        try:
            return pool.run(worker, world_size=size, backend=backend, timeout=timeout)
        finally:
            if not isinstance(sys.exc_info()[1], (PoolError, BackendError)):  # it was refused
                self._world_size, self._backend = size, backend
                on = range(size) if only is None else only
                self._had[launcher_of(backend)] = self._with_names(backend).union(on)
                pool.keep_names(launcher_of(backend))

    def _with_names(self, backend: str) -> frozenset[int]:
        """Return the ranks of this backend's launcher on which a cell or a push has run."""
        return self._had.get(launcher_of(backend), frozenset())

    def _pull(self, names: tuple[str, ...]) -> None:
        found = self._ask(rank_session.Pull(names))
        for name in names:
            if missing := [rank for rank, held in enumerate(found) if name not in held]:
                raise PoolError(f"there is no {name!r} on {name_ranks(missing)}; %ranks lists all")
        for name in names:
            self.shell.user_ns[name] = [held[name] for held in found]

    def _push(self, names: tuple[str, ...]) -> None:
        if missing := [name for name in names if name not in self.shell.user_ns]:
            raise PoolError(f"the notebook has no {missing[0]!r} to push")
        values = {name: self.shell.user_ns[name] for name in names}
        push = rank_session.Push(values, had=self._with_names(self._backend))
        try:
            self._run(push, self._world_size, self._backend)
        except PoolError:
            for name, value in values.items():
                if found := pickling.find_culprit(value, name):
                    raise arguments.refusal(*found) from None
            raise

    def _print_names(self) -> None:
        held = self._ask(rank_session.Names()) if self._had else []
        where: dict[str, list[int]] = {}
        for rank, names in enumerate(held):
            for name in names:
                where.setdefault(name, []).append(rank)
        if not where:
            print("no %%ranks cell has defined a name")
        for ranks in sorted(set(map(tuple, where.values())), key=lambda some: (-len(some), some)):
            names = ", ".join(name for name in where if tuple(where[name]) == ranks)
            print(f"on {name_ranks(list(ranks))}: {names}")

    def _reset(self) -> None:
        for launcher, ranks in self._had.items():
            if pool.keep_names(launcher, keep=False):  # else they have ended
                backend = "mpi" if launcher == "mpiexec" else "auto"
                pool.run(rank_session.Reset(), world_size=max(ranks) + 1, backend=backend)
        self._forget()

    def _ask(self, worker: Any) -> Result:
        return pool.run(worker, world_size=self._world_size, backend=self._backend)


def _parse_only(text: str | None, world_size: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        ranks = tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        ranks = ()
    if not ranks or ranks[0] < 0 or ranks[-1] >= world_size:
        raise PoolError(
            f"--only needs ranks below {world_size}, separated by commas, as in --only 0,2; "
            f"got {text!r}"
        )
    return ranks


def _left_out(error: DeadlockError, only: tuple[int, ...] | None) -> bool:
    """Return whether a rank waited for one that did not run the cell."""
    return only is not None and any(set(wait.peers) - set(only) for wait in error.waits)


def _check(source: str, file: str) -> bool:
    """Return whether a final semicolon hides the value. Raise PoolError for a syntax error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks print them
            compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        _refuse(error, source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [t.string for t in tokens if t.type != tokenize.COMMENT and t.string.strip()]
    return code[-1:] == [";"]


def _refuse(error: SyntaxError, source: str) -> NoReturn:
    line = source.split("\n")[(error.lineno or 1) - 1]
    if magic := _MAGIC.match(line):
        above = "; %%time may stand above %%ranks" if magic["name"] == "time" else ""
        raise PoolError(
            f"ranks run Python only, and {magic[0].strip()!r} is for the notebook{above}"
        ) from None
    error.text = error.text or line  # the compiler sets it for some mistakes only
    # For a SyntaxError from a magic, IPython would show its own frames and ours.
    *place, message = "".join(traceback.format_exception_only(error)).splitlines()
    where = f"line {error.lineno} of the cell: " if error.lineno else ""
    hint = [found] if (found := hint_for(message)) else []
    raise PoolError("\n".join([where + message, *place[1:], *hint])) from None


def load(shell: InteractiveShell) -> None:
    """Register the magics."""
    RanksMagics.run_cell.parser.allow_abbrev = False  # "--onl" is a mistake, not "--only"
    # Loaded again, it still knows what is on the ranks.
    magics = shell.magics_manager.registry.get("RanksMagics") or RanksMagics(shell)
    shell.register_magics(magics)
