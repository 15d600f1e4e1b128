"""Runs PyTorch's own distributed tests, which its wheel has, as workers of a pool.

Each of them is right on plain gloo, so the kit must not disturb it, and its backends should pass
it. `--record` writes torch_suite.csv: which tests pass where. Without it, a test that passed there
and does not pass now makes this fail.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import ddp_kit as kit
from ddp_kit.backends import mpi, shm
from ddp_kit.trace import recording

HERE = Path(__file__).parent
RECORD = HERE / "torch_suite.csv"
PROGRESS = HERE.parents[1] / "build" / "torch_suite.json"  # of a run that was interrupted
# Plain processes; the same with the recorder; and ranks of a pool, by its backend.
PLAIN, RECORDER = "plain", "recorder"
POOLS = {"gloo": "gloo", "shm": shm.NAME, "mpi": mpi.NAME}  # with PyTorch's name of the backend
COLUMNS = (RECORDER, *POOLS)
LIMIT = 90.0  # seconds for a test
PASSED, SKIPPED, HANGS = "passed", "skipped", "hangs"
Ended = dict[str, str]  # how tests ended, by name
Sizes = dict[str, int]  # of their worlds, by name


@functools.cache
def suite() -> types.ModuleType:
    """Return PyTorch's module of tests."""
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", "4")  # or PyTorch skips more
    # The wheel's module imports a package that is not installed with it, for its base class alone.
    stub = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal import common_distributed, common_utils

    def skip_no_test(*_args: object, **_options: object) -> Callable:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = skip_no_test  # the CPU does for these: see on_cpu
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_small_worldsize = lambda test: test  # they need 3 ranks, not 8
    common_distributed.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}
    from torch.testing._internal.distributed import distributed_test as module

    class Test(module.TestDistBackend, module.DistributedTest._DistTestBase):
        """The test of one rank, in a group of its own."""

    module.Test, module.seed = Test, common_utils.set_rng_seed
    return module


def names() -> list[str]:
    """Return the names of the tests that PyTorch does not skip on gloo."""
    test = suite().Test
    found = [name for name in dir(test) if name.startswith("test_")]
    return [name for name in found if not hasattr(getattr(test, name), "__unittest_skip__")]


class OnCPU(TorchFunctionMode):
    """Creates on the CPU what a test wants on a GPU."""

    def __torch_function__(
        self, function: Callable, _types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the function without its device."""
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cuda":
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if name in ("to", "_parse_to"):
            args = tuple("cpu" if type(one) in (int, str, torch.device) else one for one in args)
        return function(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let the tests for GPUs run on the CPU, as far as they do not look."""
    DDP = torch.nn.parallel.DistributedDataParallel
    init = DDP.__init__

    @functools.wraps(init)
    def init_on_cpu(model: object, *args: Any, **kwargs: Any) -> None:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")}
        init(model, *args, **kwargs)

    with ExitStack() as stack:
        for name in ("set_device", "synchronize", "current_device"):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, **__: 0))
        for name in ("device", "stream"):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, **__: nullcontext()))
        stack.enter_context(patch.object(DDP, "__init__", init_on_cpu))
        stack.enter_context(OnCPU())
        yield


def case(rank: int, world_size: int, name: str, backend: str, folder: str) -> str:
    """Run a test as one of its ranks; return PASSED or SKIPPED. folder: of this test alone."""
    os.environ |= {"WORLD_SIZE": str(world_size), "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1"}
    os.environ["BACKEND"] = "gloo"  # tests for gloo are tried on every backend
    module = suite()
    dist.set_debug_level(dist.DebugLevel.OFF)
    test = module.Test(name)
    test.rank, test.file_name = rank, f"{folder}/test_dir/file"
    module.INIT_METHOD, module.Barrier.barrier_id = f"file://{folder}/init_dir/file", 0
    if backend in (shm.NAME, mpi.NAME):
        {shm.NAME: shm, mpi.NAME: mpi}[backend].register()
    if hasattr(getattr(test, name), "__unittest_skip__"):
        return SKIPPED
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    test._barrier()
    module.seed()
    try:
        with on_cpu():
            getattr(test, name)()
    except unittest.SkipTest:
        return SKIPPED
    except SystemExit as leaving:  # how PyTorch's decorators skip a test
        if not 70 < int(leaving.code or 0) < 100:
            raise
        return SKIPPED
    test._barrier()
    dist.destroy_process_group()
    return PASSED


@contextmanager
def in_pool(column: str, world_size: int) -> Iterator[Callable[[str, str], tuple[str, str]]]:
    """Return a function that runs a test on the ranks of a pool; how it ended, and the error."""
    with kit.WorkerPool(world_size, backend=column, init=False) as pool:

        def run_one(name: str, folder: str) -> tuple[str, str]:
            try:
                return pool.run(case, name, POOLS[column], folder, timeout=LIMIT)[0], ""
            except kit.KitError as error:
                return type(error).__name__, str(error)

        yield run_one


def in_forks(column: str, world_size: int, name: str, folder: str) -> tuple[str, str]:
    """Run a test in forks of this process, which has imported PyTorch."""
    context, waiting, answers = multiprocessing.get_context("fork"), {}, []
    for rank in range(world_size):
        reading, writing = context.Pipe(duplex=False)
        what = column, rank, world_size, name, folder, writing
        waiting[reading] = context.Process(target=be_rank, args=what)
        waiting[reading].start()
        writing.close()
    ranks = list(waiting.values())
    while waiting and (ready := connection.wait(list(waiting), LIMIT)):
        for reading in ready:
            del waiting[reading]
            try:
                answers.append(reading.recv())
            except EOFError:
                answers.append(("died", ""))
        if any(answer[0] not in (PASSED, SKIPPED) for answer in answers):
            break
    for process in ranks:
        with suppress(ProcessLookupError):  # it may have no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    answers += [(HANGS, "")] * len(waiting)
    # A rank that waits for one that failed may hang or fail, too, but does so later.
    by_weight = {PASSED: 0, SKIPPED: 0, HANGS: 1}
    return max(answers, key=lambda answer: by_weight.get(answer[0], 2))


def be_rank(
    column: str, rank: int, world_size: int, name: str, folder: str, answers: Connection
) -> None:
    """Run a test as a rank of `in_forks`; send how it ended."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        with recording() if column == RECORDER else nullcontext():
            answer = case(rank, world_size, name, "gloo", folder), ""
    except BaseException as error:
        answer = type(error).__name__, traceback.format_exc()
    answers.send(answer)
    signal.pause()  # until the process that has asked ends this one


def run(column: str, tests: Sizes, ended: Ended, keep: Callable, text: bool = False) -> Ended:
    """Return how each test ended. ended: what is known already; keep: is called after each."""
    for world_size in sorted(set(tests.values())):
        todo = [name for name in tests if tests[name] == world_size and name not in ended]
        if not todo:
            continue
        with ExitStack() as stack:
            run_one = functools.partial(in_forks, column, world_size)
            if column in POOLS:
                run_one = stack.enter_context(in_pool(column, world_size))
            for name in todo:
                # A rank that was killed may still write when its folder is removed.
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    for needed in ("barrier", "test_dir", "init_dir"):
                        os.mkdir(f"{folder}/{needed}")
                    ended[name], error = run_one(name, folder)
                keep()
                if text:
                    print(f"{column}: {name} {ended[name]}\n{error}", file=sys.stderr, flush=True)
    return ended


def recorded() -> tuple[Sizes, dict[str, Ended]]:
    """Return the tests of the table; and, by column, how they ended."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sizes = {row["test"]: int(row["ranks"]) for row in rows}
    return sizes, {column: {row["test"]: row[column] for row in rows} for column in COLUMNS}


def record(tests: Sizes, found: dict[str, Ended]) -> None:
    """Write the table."""
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["test", "ranks", *COLUMNS])
        for name, size in tests.items():
            table.writerow([name, size, *(found[column].get(name, "") for column in COLUMNS)])


def passing(find: Callable[[str, Sizes], Ended]) -> Sizes:
    """Return the tests that pass in plain processes, each with the fewest ranks that it needs."""
    three = find(f"{PLAIN} 3", dict.fromkeys(names(), 3))
    four = find(f"{PLAIN} 4", {name: 4 for name, how in three.items() if how != PASSED})
    both = {3: three, 4: four}
    sizes = {name: size for size in both for name, how in both[size].items() if how == PASSED}
    return {name: sizes[name] for name in names() if name in sizes}


def main() -> None:
    """Run, print and compare, or record if --record is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write torch_suite.csv")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--only", default="", help="tests with this in their name")
    parser.add_argument("--resume", action="store_true", help="go on where the last run stopped")
    parser.add_argument("--text", action="store_true", help="print the error of each test")
    options = parser.parse_args()
    kept: dict[str, Ended] = {}
    if options.resume and PROGRESS.exists():
        kept = json.loads(PROGRESS.read_text("utf-8"))
    PROGRESS.parent.mkdir(exist_ok=True)

    def find(column: str, tests: Sizes) -> Ended:
        ended = kept.setdefault(column, {})
        return run(column.split()[0], tests, ended, keep, options.text)

    def keep() -> None:
        PROGRESS.write_text(json.dumps(kept), "utf-8")

    tests, before = (passing(find), {}) if options.record else recorded()
    tests = {name: size for name, size in tests.items() if options.only in name}
    worse = []
    for column in options.columns:
        if column == "mpi" and mpi.missing():
            print(mpi.missing())
            continue
        ended = find(column, tests)
        passed = [name for name in tests if ended[name] == PASSED]
        print(f"{column}: {len(passed)} of {len(tests)} of PyTorch's tests pass", flush=True)
        known = before.get(column, {})
        worse += [
            f"{column}: {name} passed, and now: {ended[name]}"
            for name in tests
            if ended[name] != PASSED == known.get(name)
        ]
    if options.record:
        record(tests, kept)
    PROGRESS.unlink(missing_ok=True)
    if worse:
        sys.exit("\n".join(worse))


if __name__ == "__main__":
    import torch_suite  # by its name, because the ranks import what they run

    torch_suite.main()
