"""A module that is edited on disk never runs its old code."""

from __future__ import annotations

import importlib
import itertools
import os
import sys

import pytest

import ddp_kit as kit

pytestmark = pytest.mark.usefixtures("forked_ranks")

numbers = itertools.count()  # a warm rank keeps the module of an earlier test by its name


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that rewrites this test's own module and returns its worker."""
    name = f"lesson_{next(numbers)}"
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(answer):
        source = f"def worker(rank, world_size):\n    return {answer}, __import__('os').getpid()\n"
        write.file.write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(name).worker

    write.file = tmp_path / f"{name}.py"
    yield write
    sys.modules.pop(name, None)


def test_an_edited_module_runs_its_new_code_and_a_line_says_so(module, capsys):
    worker = module(1)
    first = kit.run(worker, world_size=2)
    assert list(kit.run(worker, world_size=2)) == list(first), "the same code stays warm"
    capsys.readouterr()
    second = kit.run(module(2), world_size=2)
    assert [value for value, _ in second] == [2, 2]
    assert capsys.readouterr().out == (
        f"{module.file.name} changed on disk: restarting ranks 0 and 1\n"
    )
    # Same length, same second: cached bytecode does not distinguish these two.
    assert [value for value, _ in kit.run(module(3), world_size=2)] == [3, 3]


def test_only_the_rank_that_has_imported_the_module_is_restarted(module, capsys):
    module(1)
    name = module.file.stem

    def one_imports(rank, world_size):
        if rank == 1:
            return importlib.import_module(name).worker(rank, world_size)
        return 0, os.getpid()

    before = kit.run(one_imports, world_size=2)
    module(2)
    after = kit.run(one_imports, world_size=2)
    assert after[0] == before[0]
    assert (after[1][0], before[1][0]) == (2, 1)
    assert after[1][1] != before[1][1]
    assert "restarting rank 1" in capsys.readouterr().out


def test_a_rank_that_has_the_new_code_already_stays_warm(module):
    kit.run(module(1), world_size=2)
    worker = module(2)
    fresh = kit.run(worker, world_size=1)[0]
    both = kit.run(worker, world_size=2)
    assert both[0] == fresh
    assert both[1][0] == 2


def test_a_module_that_was_removed_still_runs_in_warm_ranks(module, capsys):
    worker = module(1)
    before = kit.run(worker, world_size=2)
    module.file.unlink()
    assert list(kit.run(worker, world_size=2)) == list(before)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("forked_spawn")
def test_a_notebook_runs_the_new_code_of_an_edited_module(kernel):
    edit = "%%writefile assistants.py\ndef answer(): return {}"
    use = "def worker(rank, world_size):\n    import assistants\n    return assistants.answer()"
    for answer in (1, 2):
        kernel.run(edit.format(answer))
        cell = kernel.run(f"{use}\nlist(kit.run(worker, world_size=2))")
        assert cell.contents("execute_result")[0]["data"]["text/plain"] == f"[{answer}, {answer}]"
    assert cell.stdout == "assistants.py changed on disk: restarting ranks 0 and 1\n"
