"""What ranks display, log and count in bars."""

from __future__ import annotations

import re

import pytest
from kernels import Cell, Kernel

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.notebook.live import show_displayed
from ddp_kit.pool import live_view
from ddp_kit.pool.live_view import as_seen

SHARED = """
import logging, sys
import matplotlib.pyplot as plt
from IPython.display import HTML, clear_output

class Table:
    def __init__(self, cell):
        self.cell = cell
    def _repr_html_(self):
        return f"<table>{self.cell}</table>"
"""


@pytest.fixture
def notebook(shared) -> Kernel:
    shared.run(SHARED)
    return shared


def shown(cell: Cell) -> list[str]:
    """Return prints and displays in their order: HTML as it is, of a figure its text."""
    lines: list[str] = []
    for kind, content in cell.messages:
        if kind == "stream":
            lines += content["text"].splitlines()
        elif kind == "display_data" and (data := content["data"]):
            lines.append(data.get("text/html") or data["text/plain"])
    return lines


FIGURE = "<Figure size 640x480 with 1 Axes>"


# --- figures, HTML, tables -------------------------------------------------------------------


def test_a_rank_that_displays_nothing_does_not_load_ipython(notebook):
    notebook.run(
        "with kit.WorkerPool(1) as own:\n    kinds = own.run(lambda r, w: set(sys.modules))"
    )
    assert notebook.value("{'IPython', 'matplotlib'} & kinds[0]") == "set()"


def test_what_ranks_display_is_shown_below_their_names(notebook):
    notebook.run(
        "def worker(rank, world_size):\n"
        "    display(Table(rank), HTML('<b>same</b>'))\n"
        "    plt.plot([0, rank])\n"
        "    plt.show()\n"
        "    print('printed')\n"
        "    display(rank)\n"
        "    plt.plot([1, 0])\n"  # left open
    )
    cell = notebook.run("result = kit.run(worker, world_size=3)")
    own = [[f"rank {rank}:", f"<table>{rank}</table>"] for rank in range(3)]
    same = ["ranks 0, 1 and 2:", "<b>same</b>"]
    prints = [f"[rank {rank}] printed" for rank in range(3)]
    figures = [f"rank {rank}:\n{FIGURE}\nrank {rank}: {rank}".splitlines() for rank in range(3)]
    last = ["ranks 0, 1 and 2:", FIGURE]
    assert shown(cell) == [
        *prints,
        *(own[0] + same + figures[0] + last),
        *(own[1] + figures[1]),
        *(own[2] + figures[2]),
    ]
    pictures = [c["data"].get("image/png") for c in cell.contents("display_data")]
    assert len(set(filter(None, pictures))) == 4, "three differ, and one is shown once"
    assert notebook.value("result.output") == "('printed\\n', 'printed\\n', 'printed\\n')"


def test_what_was_displayed_before_an_error_is_shown(notebook):
    notebook.run(
        "def worker(rank, world_size):\n"
        "    from IPython.display import HTML, display\n"
        "    display(HTML('<b>first</b>'))\n"
        "    plt.plot([0, rank])\n"
        "    if rank == 1:\n"
        "        raise ValueError('boom')\n"
    )
    cell = notebook.raises("kit.run(worker, world_size=2)")
    assert shown(cell) == ["ranks 0 and 1:", "<b>first</b>", "rank 0:", FIGURE]
    kinds = [kind for kind, _ in cell.messages]
    assert kinds.index("error") > max(at for at, kind in enumerate(kinds) if kind == "display_data")
    after = notebook.run("kit.run(lambda rank, world_size: None, world_size=2)")
    assert shown(after) == [], "nothing of one run is shown in the next"
    unseen = notebook.run(
        "from ddp_kit.pool import live_view\n"
        "with live_view.unseen():\n"
        "    kit.run(lambda rank, world_size: display('unseen'), world_size=1)"
    )
    assert shown(unseen) == []


def test_a_display_that_is_updated_or_cleared_has_its_last_content(notebook):
    notebook.run(
        "def worker(rank, world_size):\n"
        "    display('gone')\n"
        "    clear_output(wait=True)\n"
        "    handle = display(HTML('old'), display_id=True)\n"
        "    widget = 'application/vnd.jupyter.widget-view+json'\n"
        "    display({'text/html': 'raw', 'text/plain': '', widget: {}}, raw=True)\n"
        "    handle.update(HTML('new'))\n"
    )
    cell = notebook.run("kit.run(worker, world_size=1)")
    assert shown(cell) == ["rank 0:", "new", "rank 0:", "raw"]
    assert "widget" not in str(cell.contents("display_data")), "its model is not in the notebook"


def test_of_a_flood_of_displays_the_first_are_shown(notebook):
    notebook.run(
        "def worker(rank, world_size, size):\n"
        "    for _ in range(3):\n"
        "        display(HTML('x' * size))\n"
        "    display(HTML('small'))\n"
    )
    most = settings.DISPLAYED_KEPT
    cell = notebook.run(f"kit.run(worker, {most // 2 - 1000}, world_size=1)")
    assert [line[:5] for line in shown(cell)] == ["rank ", "xxxxx"] * 2 + [
        "rank ",
        "small",
        "rank ",
    ]
    assert shown(cell)[-1] == (
        f"rank 0: ... 1 more left out: a rank may display {most:,} bytes a run"
    )


def test_a_display_that_fails_in_the_notebook_leaves_the_result_and_the_error(notebook):
    notebook.run(
        "from ddp_kit.pool import live_view\n"
        "def worker(rank, world_size, fails):\n"
        "    display({'text/plain': 5}, raw=True)\n"
        "    return 7 // (not fails)"
    )
    cell = notebook.run("result = kit.run(worker, False, world_size=1)")
    assert cell.stdout == "rank 0: 5\n"
    notebook.run(
        "before = live_view.current\n"
        "live_view.use(live_view.View(show_displayed=lambda displayed: displayed['none']))"
    )
    try:
        cell = notebook.run("result = kit.run(worker, False, world_size=1)")
        assert cell.stdout == "what the ranks displayed cannot be shown: KeyError('none')\n"
        assert notebook.value("result[0]") == "7"
        cell = notebook.raises("kit.run(worker, True, world_size=1)")
        assert "rank 0 raised ZeroDivisionError" in cell.rendered
    finally:
        notebook.run("live_view.use(before)")


def test_a_display_that_is_wrong_is_an_error_of_the_rank(notebook):
    notebook.run(
        "def worker(rank, world_size, what):\n"
        "    from IPython.display import publish_display_data\n"
        "    display('first')\n"
        "    if what == 'no json':\n"
        "        display({'a/b': {1, 2}}, raw=True)\n"
        "    if what == 'published':\n"
        "        publish_display_data({'text/plain': 'second'}, update=True)\n"
        "    display('second', update=True)\n"
    )
    for what in ("no json", "published", "displayed"):
        cell = notebook.raises(f"kit.run(worker, {what!r}, world_size=1)")
        words = "Object of type set is not JSON serializable"
        if what != "no json":
            words = "display_id required for update_display"
        assert f"rank 0 raised TypeError: {words}" in cell.rendered
        assert shown(cell) == ["rank 0: 'first'"]


def test_a_pyplot_that_is_half_imported_does_not_hide_the_error(notebook):
    notebook.run(
        "import types\n"
        "def worker(rank, world_size):\n"
        "    half = types.ModuleType('half imported')\n"
        "    sys.modules['matplotlib'] = sys.modules['matplotlib.pyplot'] = half\n"
        "    raise ValueError('boom')"
    )
    code = (
        "with kit.WorkerPool(1) as own:\n"
        "    try:\n"
        "        own.run(worker)\n"
        "    except kit.RankError as error:\n"
        "        print(error.failures[0].message)"
    )
    assert notebook.run(code).stdout == "boom\n"


def test_a_rank_of_a_script_displays_text():
    def worker(rank, world_size):
        import matplotlib.pyplot as plt
        from IPython.display import HTML, display

        plt.plot([0, 1])
        plt.show()
        display(HTML("text"))

    result = kit.run(worker, world_size=1)
    assert result.output[0].splitlines()[-1] == "<IPython.core.display.HTML object>"


def test_a_long_text_such_as_a_state_dict_is_cut(capsys):
    show_displayed({rank: [({"text/plain": "weight " * 2_000}, {})] for rank in (0, 1)})
    shown = capsys.readouterr().out.splitlines()
    assert [line[:14] for line in shown] == ["rank 0: weight", "rank 1: weight"]
    assert all(line.endswith("... and 12,500 more characters") for line in shown)


def test_equal_displays_are_folded_across_different_ones(capsys):
    """So a figure of all ranks appears once, also after a table of one."""
    html = [({"text/html": text, "text/plain": f"<object at {text}>"}, {}) for text in "ab"]
    same = ({"text/html": "a", "text/plain": "<object at another address>"}, {})
    show_displayed({0: [html[0]], 1: [html[1], html[0]], 3: [same]})
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert heads == ["ranks 0, 1 and 3:", "rank 1:"]


# --- tqdm ----------------------------------------------------------------------------------

BARS = """
from tqdm.notebook import tqdm as in_notebook
from tqdm.auto import tqdm as auto
from tqdm import tqdm

def seen(go):
    while not pathlib.Path(go, "on").exists():
        time.sleep(0.01)

def worker(rank, world_size, go):
    if rank < 3:
        kind = (tqdm, auto, in_notebook)[rank]
        for step in kind(range(4), mininterval=0):
            if step == 3:
                kind.write("written")
                seen(go)
    else:
        for epoch in (bar := tqdm(range(5), desc="epochs", mininterval=0)):
            bar.set_postfix(loss=0.5)
            for step in tqdm(range(2), mininterval=0):
                pass
            if epoch == 2:
                seen(go)
    for step in tqdm(range(7), disable=True):
        pass
"""


def test_a_bar_of_tqdm_is_a_bar_of_the_live_view(notebook, tmp_path):
    notebook.run(BARS)
    cell = notebook.send(f"kit.run(worker, {str(tmp_path)!r}, world_size=4)")
    two = r'value="2" max="5">.*2&nbsp;of&nbsp;5.*<samp>epochs, loss=0\.5</samp>'

    def all_seen(cell: Cell) -> bool:
        updates = cell.contents("update_display_data")
        *rows, last = updates[-1]["data"].get("text/html", "").split("<tr>") if updates else [""]
        three = [row for row in rows if 'value="3" max="4">' in row and "3&nbsp;of&nbsp;4" in row]
        return len(three) == 3 and re.search(two, last) is not None

    try:
        cell.read_until(all_seen)
        assert not cell.ended, "the bars were not shown while the loops lasted"
    finally:
        (tmp_path / "on").touch()
        cell.finish()
    assert cell.stdout == "".join(f"[rank {rank}] written\n" for rank in range(3))
    assert cell.stderr == ""


@pytest.fixture
def live(monkeypatch):
    """A run has a live view, as on a terminal."""
    monkeypatch.setattr(live_view, "current", live_view.View(live_view.LiveView))


@pytest.mark.usefixtures("live")
def test_a_bar_in_a_file_is_written_and_one_that_is_left_does_not_hide_an_error(tmp_path):
    def worker(rank, world_size, path):
        from tqdm import tqdm

        class Watched(tqdm):  # a class of a library, as it may be
            pass

        bar = Watched(total=2.5, desc="bytes", unit="B", unit_scale=True)
        bar.update(1.5)
        bar.set_postfix(loss=0.5)
        with open(path, "w") as file:
            for _ in tqdm(range(2), file=file):
                pass
        for _ in tqdm(range(2)):
            raise ValueError("in a loop")

    path = tmp_path / "bar"
    with pytest.raises(kit.RankError, match="in a loop"):
        kit.run(worker, str(path), world_size=1)
    assert "2/2" in path.read_text()


def test_a_script_without_a_terminal_prints_a_bar_of_tqdm():
    def worker(rank, world_size):
        from tqdm import tqdm
        from tqdm.notebook import tqdm as in_notebook

        for kind in (tqdm, in_notebook):
            for _ in kind(range(3), desc=kind.__name__):
                pass

    result = kit.run(worker, world_size=1)
    last = [as_seen(line) for line in result.output[0].removesuffix("\n").split("\n")]
    assert ["3/3" in line and line.split(":")[0] for line in last] == ["tqdm", "tqdm_notebook"]
