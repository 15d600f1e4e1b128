"""`%%ranks` and `%ranks` in a real kernel."""

from __future__ import annotations

import json
import linecache
from types import SimpleNamespace

import pytest
from kernels import Kernel, interrupt
from processes import assert_gone

from ddp_kit.pool import ipython


@pytest.fixture
def notebook(shared) -> Kernel:
    """A kernel with warm ranks that knows the magics, and has no names on the ranks."""
    shared.run("%reload_ext ddp_kit")
    shared.run("%ranks reset")
    return shared


# --- a cell on every rank --------------------------------------------------------------------


def test_a_cell_runs_on_all_ranks_and_shows_prints_and_last_values_in_rank_order(notebook):
    cell = notebook.run(
        "%%ranks\n"
        "x = torch.ones(2) * rank\n"
        "dist.all_reduce(x)\n"
        "print('I am', rank, kit.device())\n"
        "x"
    )
    printed = "".join(f"[rank {rank}] I am {rank} cpu\n" for rank in range(4))
    assert cell.stdout == printed + "".join(f"rank {rank}: tensor([6., 6.])\n" for rank in range(4))


def test_a_function_that_a_cell_replaces_is_put_back_and_the_names_stay(notebook):
    replaced = notebook.run("%%ranks -n 2\nkept = rank\ntorch.sum = dist.barrier = None")
    assert replaced.stdout == "".join(
        f"[rank {rank}] the next cell has the original torch.distributed.barrier and 1 more again\n"
        for rank in range(2)
    )
    after = notebook.run("%%ranks\ndist.barrier()\nkept + torch.sum(torch.ones(2)).item()")
    assert after.stdout == "rank 0: 2.0\nrank 1: 3.0\n"


def test_names_stay_on_each_rank_until_reset(notebook):
    notebook.run("%%ranks -n 2\nheld = [rank]\ndef grow():\n    held.append(world_size)")
    # Without -n it is as many ranks as before, and a function of an earlier cell sees their names.
    assert notebook.run("%%ranks\ngrow()\nheld").stdout == "rank 0: [0, 2]\nrank 1: [1, 2]\n"
    assert notebook.run("%ranks").stdout == "on ranks 0 and 1: grow, held\n"
    notebook.run("kit.run(lambda rank, world_size: None, world_size=4)")
    more = notebook.raises("%%ranks -n 4\nheld")
    assert "ranks 2 and 3 raised NameError: name 'held'" in more.rendered
    assert "ranks 0" not in more.rendered
    notebook.run("%ranks reset")
    assert notebook.run("%ranks").stdout == "no %%ranks cell has defined a name\n"
    assert "4 ranks" in notebook.run("%%ranks\nprint(f'{world_size} ranks')").stdout
    assert "NameError: name 'held'" in notebook.raises("%%ranks\nheld").rendered


def test_a_name_that_only_the_notebook_has_is_explained(notebook):
    notebook.run("only_here = 2\nimport statistics as stats")
    missing = notebook.raises("%%ranks -n 2\nonly_here * rank").rendered
    hint = "only_here is defined in the notebook, but not on the ranks: copy it with %ranks push"
    assert missing.count(f"{hint} only_here.") == 1
    module = notebook.raises("%%ranks\nstats.mean([rank])").rendered
    assert "stats is defined in the notebook, but not on the ranks: import it in a %%r" in module
    for name in ("nowhere", "get_ipython", "In", "Out"):  # the last three are IPython's
        assert "is defined in the notebook" not in notebook.raises(f"%%ranks\n{name}").rendered
    notebook.run("%ranks push only_here")
    assert notebook.run("%%ranks\nonly_here * rank").stdout == "rank 0: 0\nrank 1: 2\n"


def test_only_some_ranks_run_the_cell(notebook):
    cell = notebook.run("%%ranks --only 3,1\nmine = rank\nmine, world_size")
    assert cell.stdout == "rank 1: (1, 4)\nrank 3: (3, 4)\n"
    assert notebook.run("%ranks").stdout == "on ranks 1 and 3: mine\n"
    assert notebook.value("list(_ranks)") == "[None, (1, 4), None, (3, 4)]"


def test_groups_and_random_numbers_go_on_in_the_next_cell(notebook):
    cells = (
        "%%ranks -n 2\ntorch.manual_seed(1)\npair = dist.new_group([0, 1])",
        ("%%ranks\none = torch.rand(1)\ndist.all_reduce(one, group=pair)\none"),
    )
    notebook.run(cells[0])
    first = notebook.run(cells[1]).stdout
    notebook.raises("%%ranks\nundefined")  # an error on every rank leaves none waiting in a group
    notebook.run("kit.run(lambda rank, world_size: torch.manual_seed(5), world_size=2)")
    second = notebook.run(cells[1]).stdout
    assert first != second
    notebook.run("%%ranks\ntorch.manual_seed(1)\nboth = torch.rand(2) * 2\nboth")
    assert notebook.value("[round(v, 4) for v in _ranks[0].tolist()]") == (
        f"[{first.split('[')[1].split(']')[0]}, {second.split('[')[1].split(']')[0]}]"
    )


def test_a_group_that_has_ended_is_reported(notebook):
    notebook.run("%%ranks -n 2\npair = dist.new_group([0, 1])")
    notebook.run("kit.run(lambda rank, world_size: None, world_size=3)")
    printed = notebook.run("%%ranks\nprint('next')").stdout.splitlines()
    over = "the process group was formed again; groups and DDP models of earlier cells are void"
    assert printed == [f"[rank {rank}] {line}" for rank in (0, 1) for line in (over, "next")]
    assert notebook.run("%%ranks\nrank").stdout == "rank 0: 0\nrank 1: 1\n"
    notebook.run("%ranks reset")
    groups = "list(kit.run(lambda r, w: len(dist.distributed_c10d._world.pg_map), world_size=2))"
    assert notebook.value(groups) == "[1, 1]"


def test_a_class_of_a_cell_can_be_saved_and_pulled(notebook):
    notebook.run(
        "%%ranks -n 2\n"
        "import io\n"
        "class Net(torch.nn.Linear):\n"
        "    pass\n"
        "net = Net(1, rank + 1)\n"
        "torch.save(net, io.BytesIO())\n"
    )
    notebook.run("%ranks pull net")
    assert notebook.value("[type(n).__name__ + str(n.out_features) for n in net]") == (
        "['Net1', 'Net2']"
    )


# --- what is shown -----------------------------------------------------------------------------


def test_a_figure_appears_once_below_its_ranks_heading(notebook):
    # As last value, open; shown by plt.show; left open; and as text where the value is none.
    for body in ("figure", "plt.show()", "None", "display(figure)\nplt.close()"):
        cell = notebook.run(
            "%%ranks -n 2\nimport matplotlib.pyplot as plt\n"
            f"figure, axes = plt.subplots()\naxes.plot([0, rank])\n{body}"
        )
        shown = [kind for kind, _ in cell.messages if kind in ("stream", "display_data")]
        pictures = [c["data"] for c in cell.contents("display_data") if "image/png" in c["data"]]
        assert len(pictures) == 2, body
        assert cell.stdout == "rank 0:\nrank 1:\n", body
        assert shown[-4:] == ["stream", "display_data"] * 2, body  # each after its heading
        assert pictures[0]["image/png"] != pictures[1]["image/png"]
        assert pictures[0]["text/plain"] == "<Figure size 640x480 with 1 Axes>"
    raising = notebook.raises("%%ranks\nplt.plot([rank])\ndisplay(rank)\n1 / 0")
    assert raising.stdout == "rank 0: 0\nrank 1: 1\n"
    assert notebook.run("%%ranks\nrank").stdout == "rank 0: 0\nrank 1: 1\n"
    assert notebook.value("kit.run(lambda r, w: os.environ['MPLBACKEND'], world_size=2)[0]") == (
        notebook.value("os.environ['MPLBACKEND']")
    )


def test_values_are_shown_as_ipython_shows_them(notebook):
    cell = notebook.run(
        "%%ranks -n 2\n"
        "class Bold:\n"
        "    def __repr__(self):\n"
        "        return 'bold'\n"
        "    def _repr_html_(self):\n"
        "        return f'<b>{rank}</b>'\n"
        "display(Bold(), 'text')\n"
        "Bold()"
    )
    html = [c["data"]["text/html"] for c in cell.contents("display_data") if c["data"]]
    assert html == ["<b>0</b>", "<b>0</b>", "<b>1</b>", "<b>1</b>"]
    assert cell.stdout.count("'text'") == 2
    assert notebook.run("%%ranks\nrank;").stdout == ""
    assert notebook.run("%%ranks\nrank  # a comment;").stdout == "rank 0: 0\nrank 1: 1\n"
    assert notebook.run("%%ranks\nNone").stdout == ""
    lines = notebook.run("%%ranks\ntorch.arange(4).view(2, 2)").stdout.splitlines()
    assert lines[:2] == ["rank 0: tensor([[0, 1],", "                [2, 3]])"]


def test_the_result_has_values_output_and_trace(notebook):
    notebook.run("%%ranks -n 2\nprint('hello')\ndist.all_reduce(torch.ones(3))\nrank * 10")
    assert notebook.value("list(_ranks), _ranks.output[1], len(_ranks.trace.events)") == (
        "([0, 10], 'hello\\n', 2)"
    )
    # A value that cannot be sent comes back as its text.
    notebook.run("%%ranks\nlambda: 1\n(i for i in range(3))")
    assert notebook.value("_ranks[0].split(' at ')[0]") == "'<generator object <genexpr>'"
    # So does a value that only a rank can rebuild.
    notebook.run(
        "%%ranks\n"
        "class Homesick:\n"
        "    def __repr__(self):\n"
        "        return 'homesick'\n"
        "    def __setstate__(self, state):\n"
        "        dist.get_rank()\n"
        "home = Homesick()\nhome.x = 1\nhome"
    )
    assert notebook.value("list(_ranks)") == "['homesick', 'homesick']"
    notebook.run("%%ranks\n{'a': torch.ones(100_000), 'b': [rank]}")
    assert notebook.value("_ranks[1]['a'].sum().item(), _ranks[1]['b']") == "(100000.0, [1])"


# --- what goes wrong ---------------------------------------------------------------------------


def test_an_error_names_the_line_of_the_cell(notebook):
    cell = notebook.raises("%%ranks -n 2\ndef fails():\n    return 1 / 0\n\nrank or fails()")
    assert cell.error["ename"] == "RankError"
    assert (
        f"Cell In[{cell.contents('execute_input')[0]['execution_count']}], line 5" in cell.rendered
    )
    assert "line 5, in <module>\n    rank or fails()" in cell.rendered
    assert "line 3, in fails\n    return 1 / 0" in cell.rendered
    assert notebook.value("_ranks.failures[0].type") == "'ZeroDivisionError'"
    shown = notebook.value("_ranks")
    assert shown.startswith(
        "RankError:\nrank 0 raised ZeroDivisionError: division by zero\n  Cell In"
    )
    assert "line 3, in fails\n    return 1 / 0" in shown
    # Nobody was stuck: the names are still there.
    assert notebook.run("%ranks").stdout == "on ranks 0 and 1: fails\n"
    nested = notebook.raises("%%time\n%%ranks\n1 / 0")
    assert "line 3, in <module>" in nested.rendered


WRONG = [
    (
        "%%ranks\nx = = 3",
        "PoolError",
        "line 2 of the cell: SyntaxError: invalid syntax\n    x = = 3",
    ),
    ("%%ranks\n('a'\n    % (1 2))", "PoolError", "SyntaxError: invalid syntax. Perhaps you forgot"),
    ("%%ranks --n 2\nrank", "PoolError", "unrecognized arguments: --n"),
    ("%%ranks -n 0\nrank", "PoolError", "world_size must be at least 1, got 0"),
    ("%%ranks --only 4\nrank", "PoolError", "ranks below 4"),
    ("%%ranks --timeout -1\nrank", "PoolError", "positive number of seconds"),
    ("%%ranks --backend none\nrank", "BackendError", "none"),
    ("%%ranks\n%timeit 3", "PoolError", "'%timeit' is for the notebook"),
    ("%ranks fetch x", "PoolError", "use pull NAME, push NAME, reset or debug RANK"),
    ("%ranks pull", "PoolError", "needs names"),
    ("%ranks pull nothing", "PoolError", "no 'nothing' on ranks 0, 1, 2 and 3"),
    ("%ranks push nothing", "PoolError", "the notebook has no 'nothing'"),
    ("%ranks push kept unsendable", "PoolError", "unsendable['out'] cannot be sent"),
]


def test_an_impossible_cell_is_a_kit_error_and_nothing_is_lost(notebook):
    notebook.run("import sys\nunsendable = {'out': open(sys.executable)}\nkept = 1")
    notebook.run("%%ranks\nkept = rank")
    for cell, kind, message in WRONG:
        wrong = notebook.raises(cell)
        assert wrong.error["ename"] == kind, cell
        assert message in wrong.rendered, cell
        assert wrong.stderr == "", cell
    # None of them has changed how many ranks the next cell has, or what is on them.
    assert notebook.run("%%ranks\nkept").stdout == "".join(f"rank {r}: {r}\n" for r in range(4))


@pytest.mark.usefixtures("forked_spawn")
def test_a_timeout_an_interrupt_and_a_verdict_end_a_cell_and_the_next_says_what_is_gone(kernel):
    kernel.run("%load_ext ddp_kit")
    ranks = kernel.ranks(2)
    late = kernel.raises("%%ranks -n 2 --timeout 60\nheld = 3\nif rank: time = 1; time.sleep()")
    assert late.error["ename"] == "RankError"  # rank 0 has returned, so nobody was stopped
    late = kernel.raises("%%ranks --timeout 10\nimport time\nif rank: time.sleep(60)")
    assert late.error["ename"] == "RunTimeoutError"
    assert_gone(ranks[1:], "a timeout")
    after = kernel.run("%%ranks\nheld if rank == 0 else 'held' in globals()")
    assert after.stdout == (
        "[rank 1] this rank was restarted; the names of earlier cells are gone\n"
        "rank 0: 3\nrank 1: False\n"
    )
    ranks = kernel.ranks(2)
    cell = kernel.send("%%ranks\nprint('begun', flush=True)\nwhile True: pass")
    cell.read_until(lambda cell: "begun" in str(cell.contents("update_display_data")))
    interrupt(kernel, cell, "a loop in a cell")
    assert_gone(ranks, "an interrupt")
    after = kernel.run("%%ranks\nrank").stdout.splitlines()
    assert [line for line in after if "restarted" in line] == [
        f"[rank {rank}] this rank was restarted; the names of earlier cells are gone"
        for rank in range(2)
    ]
    assert after[2:] == ["rank 0: 0", "rank 1: 1"]
    assert kernel.run("%%ranks\nrank").stdout == "rank 0: 0\nrank 1: 1\n"
    stuck = kernel.raises("%%ranks -n 3 --only 0,1\n\ndist.recv(torch.zeros(1), src=1 - rank)")
    assert stuck.error["ename"] == "DeadlockError"
    assert "line 3, in <module>\n    dist.recv(torch.zeros(1), src=1 - rank)" in stuck.rendered
    assert stuck.rendered.endswith("wait for them after the sends.")
    assert kernel.value("len(_ranks.waits)") == "2"
    assert kernel.raises("%ranks debug").rendered == (
        "PoolError: %ranks debug shows ranks that raised in a function of yours on this host, and "
        "none did: the last run that failed ended with a DeadlockError"
    )
    alone = kernel.raises("%%ranks -n 2 --only 0\ndist.barrier()")
    assert "for rank 1, which has returned without calling it" in alone.rendered
    assert alone.rendered.endswith(
        "--only leaves out ranks: let all that communicate run the cell."
    )


# --- between the notebook and the ranks ----------------------------------------------------------


def test_push_copies_to_the_ranks_and_pull_brings_back_a_list(notebook):
    notebook.run("table, scale = {'a': 1}, lambda x: 10 * x")
    notebook.run("%%ranks -n 2\npass")
    notebook.run("%ranks push table scale")
    notebook.run("%%ranks\ntable['a'] += scale(rank)\nall_of_it = torch.full((100_000,), rank)")
    notebook.run("%ranks pull table all_of_it")
    assert notebook.value("table, [t.sum().item() for t in all_of_it]") == (
        "([{'a': 1}, {'a': 11}], [0, 100000])"
    )
    notebook.run("%%ranks --only 0\nbest = 7")
    missing = notebook.raises("%ranks pull best")
    assert "no 'best' on rank 1" in missing.rendered
    notebook.run("%%ranks\nopen_file = open('/dev/null')")
    unsendable = notebook.raises("%ranks pull open_file")
    assert "open_file is a TextIOWrapper, which cannot be sent" in unsendable.rendered


@pytest.mark.parametrize(
    ("cell", "hint"),
    [
        ("dist = 5\ndist.barrier()", "dist is a variable of type int here: give that another name"),
        ("import asyncio\nawait asyncio.sleep(0)", "pass its call to asyncio.run()."),
        ("def f():\n    print(rank)\n    rank = 1\nf()", "rank is a local variable, because"),
    ],
)
def test_a_cell_that_fails_in_a_known_way_has_a_hint(notebook, cell, hint):
    assert hint in notebook.raises(f"%%ranks -n 2\n{cell}").rendered


def test_options_that_run_has_taken_for_its_own_are_explained(notebook):
    cell = notebook.send("%run -m ddp_kit.lessons.ring_allreduce --world-size 3").finish()
    assert cell.stdout == (
        "Options of the program come after --: "
        "%run -m ddp_kit.lessons.ring_allreduce -- --world-size 3\n"
    )
    assert "Options" not in notebook.send("%run --no-such-option").finish().stdout


def test_work_that_a_cell_leaves_behind_is_reported_and_disturbs_no_later_cell(notebook):
    notebook.run("%%ranks -n 2\npass")
    left = notebook.run("%%ranks\nwork = dist.isend(torch.ones(1), 1) if rank == 0 else None\nrank")
    assert "rank 0 never waited for isend(dst=1)" in left.stdout
    assert notebook.run("%%ranks\ndist.barrier()\nrank").stdout == "rank 0: 0\nrank 1: 1\n"


def test_a_cell_is_in_the_class_view_without_its_code(notebook, tmp_path):
    path = tmp_path / "progress.jsonl"
    notebook.run(f"import os; os.environ['DDP_KIT_PROGRESS'] = {str(path)!r}; secret = 1")
    notebook.run("%%ranks -n 2\nsecret_value = rank")
    notebook.raises("%%ranks -n 2\nsecret")
    notebook.run("del os.environ['DDP_KIT_PROGRESS'], secret")
    right, wrong = map(json.loads, path.read_text().splitlines())
    assert right.keys() == {"exercise", "passed", "seconds"}
    assert (wrong["exercise"], wrong["error"]) == ("%%ranks", "RankError")
    assert "secret" not in path.read_text()


# --- the IPython of Colab, version 7 -------------------------------------------------------------


def test_cells_without_numbers_are_still_distinguished_from_files(monkeypatch):
    old = SimpleNamespace(compile=object())
    monkeypatch.setattr(ipython, "shell", lambda: old)
    monkeypatch.setattr(linecache, "_ipython_cache", {"<ipython-input-1-a>": ()}, raising=False)
    assert ipython.cell_names() == {"<ipython-input-1-a>": "Cell"}
