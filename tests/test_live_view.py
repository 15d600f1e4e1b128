"""What a learner sees while a run lasts: in a real kernel, on a terminal, and as plain data."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from html import unescape
from pathlib import Path

import pytest
import torch.distributed as dist
from kernels import ENVIRONMENT, Cell
from processes import wait_until

import ddp_kit as kit
from ddp_kit import settings
from ddp_kit.notebook.live import as_table
from ddp_kit.pool import live_view
from ddp_kit.pool.live_view import (
    LiveView,
    RankLine,
    TerminalView,
    View,
    heading,
    in_short,
    newest_line,
    print_output,
)
from ddp_kit.trace import Board, Snapshot, read_wait

# --- in a notebook -------------------------------------------------------------------------

DEMO = """
def seen(go, name):
    while not pathlib.Path(go, name).exists():
        time.sleep(0.01)

def demo(rank, world_size, go):
    print("\\x1b[31mred\\x1b[0m", rank, "<b>bold</b> & more\\n")
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    elif rank == 1:
        for step in kit.progress(range(4)):
            if step == 3:
                print("10%\\r75%\\r", end="", flush=True)
                seen(go, "on")
        dist.send(torch.zeros(1), dst=0)
        seen(go, "end")
"""
WAITING = re.compile(r"waiting in recv\(src=1\) +(\d+\.\d) s")
TITLE = re.compile(r"3 ranks at work, \d+ s$", re.MULTILINE)
COMPUTES = re.compile(r"computing \d+ s")


def words(html: str) -> list[list[str]]:
    """Return the cells of each row of the table, without tags."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    cells = ([re.sub("<.*?>", "", c) for c in re.findall(r"<t[hd]>(.*?)</t[hd]>", r)] for r in rows)
    return [[unescape(cell).replace("\xa0", " ") for cell in row] for row in cells]


def as_text(html: str) -> str:
    """Return the title of a table, and a line for each row."""
    title = re.search("</style><div>(.*?) <em", html)
    rows = (f"[{name}] {'  '.join(filter(None, others))}" for name, *others in words(html))
    return "\n".join([title[1] if title else "", *rows])


def texts(cell: Cell) -> list[str]:
    """Return what the cell's display has shown, as text, from the first content to the newest."""
    displays = cell.contents("display_data", "update_display_data")
    return [as_text(content["data"].get("text/html", "")) for content in displays]


def on_screen(cell: Cell) -> str:
    return next(iter(texts(cell)[-1:]), "")


def test_each_rank_has_a_line_while_a_run_lasts_and_nothing_of_it_stays(shared, tmp_path):
    shared.run(DEMO)
    sent = time.monotonic()
    cell = shared.send(f"print('before')\nkit.run(demo, {str(tmp_path)!r}, world_size=3)")

    def waits_for_a_while(cell: Cell) -> bool:
        shown = on_screen(cell)
        found = WAITING.search(shown)
        others = re.search(r"\[rank 1\] computing \d+ s .* 75%\n\[rank 2\] done", shown)
        return bool(TITLE.match(shown) and others and found and float(found[1]) >= 0.6)

    try:
        cell.read_until(waits_for_a_while)
        assert not cell.ended, "the wait was not shown while it lasted"
        stuck = cell.contents("update_display_data")[-1]["data"]
        (tmp_path / "on").touch()
        both = re.compile(r"\[rank 0\] done.*\n\[rank 1\] computing")
        cell.read_until(lambda cell: both.search(on_screen(cell)))
        assert not cell.ended, "a rank that is done was not shown beside one at work"
        late = on_screen(cell)
    finally:
        (tmp_path / "on").touch()
        (tmp_path / "end").touch()
        cell.finish()
    lasted = time.monotonic() - sent

    assert stuck.keys() == {"text/html", "text/plain"}
    table = as_text(stuck["text/html"])
    waited, at_work = WAITING.search(table)[0], TITLE.match(table)[0]
    computes = COMPUTES.search(table)[0]
    assert stuck["text/plain"].startswith("3 ranks: 1 waiting in recv ")
    assert words(stuck["text/html"]) == [
        ["rank 0", waited, "", "", "red 0 <b>bold</b> & more"],
        ["rank 1", computes, "", "3 of 4", "75%"],
        ["rank 2", "done", "", "", "red 2 <b>bold</b> & more"],
    ]
    assert f"</style><div>{at_work} <em style=" in stuck["text/html"]
    assert stuck["text/html"].count('<progress value="3" max="4"></progress>') == 1
    assert "<b>" not in stuck["text/html"], "what a rank prints is not HTML"
    assert re.search(r"\[rank 1\] computing( \d+ s)? +75%", late), (
        "the bar disappeared with its loop"
    )

    seconds = [float(found[1]) for text in texts(cell) if (found := WAITING.search(text))]
    assert seconds == sorted(set(seconds)), "a wait grows, and each content is a new one"
    assert min(seconds) >= 0.2, "a wait is shown once it has lasted a little"
    first, *updates = cell.contents("display_data", "update_display_data")
    assert first["data"] == {} == updates[-1]["data"], "nbval compares the two"
    assert len(cell.contents("display_data")) == 1
    assert len(updates) <= 10 * lasted + 1
    red = "\x1b[31mred\x1b[0m"
    assert cell.stdout == (
        f"before\n[rank 0] {red} 0 <b>bold</b> & more\n[rank 0]\n"
        f"[rank 1] {red} 1 <b>bold</b> & more\n[rank 1]\n[rank 1] 75%\n"
        f"[rank 2] {red} 2 <b>bold</b> & more\n[rank 2]\n"
    )
    assert cell.stderr == ""


FLOOD = """
def lines(rank, world_size):
    for number in range(1000 * rank):
        print(number)
"""


def test_of_a_flood_a_cell_shows_the_first_and_last_lines(shared):
    shared.run(FLOOD)
    cell = shared.run("result = kit.run(lines, world_size=2)")
    printed = cell.stdout.splitlines()
    assert len(printed) == 201
    assert (printed[0], printed[99], printed[101], printed[-1]) == tuple(
        f"[rank 1] {number}" for number in (0, 99, 900, 999)
    )
    assert printed[100] == (
        "[rank 1] ... 3,201 characters are not shown here; .output[1] of the result or the error "
        "has more ..."
    )
    assert shared.value("len(result.output[1].splitlines())") == "1000"


# --- on a terminal -------------------------------------------------------------------------

SCRIPT = """
import time
import torch, torch.distributed as dist
import ddp_kit as kit

def worker(rank, world_size):
    print("printed by", rank)
    time.sleep(0.5)
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    elif rank == 1:
        time.sleep(1)
        for step in kit.progress(range(2)):
            time.sleep(0.5)
        dist.send(torch.zeros(1), dst=0)

kit.run(worker, world_size=2)
print("after")
"""


def run_on_terminal(script: Path, columns: int) -> tuple[str, str]:
    """Run a script whose stderr is a terminal; return what it wrote to stdout, and to there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, str(script)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": theirs}
    process = subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes)
    os.close(theirs)
    shown = b""
    try:
        while True:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed everywhere
                break
        printed, _ = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return printed, shown.decode()


def test_a_terminal_has_one_line_that_is_wiped(tmp_path):
    """That a pipe has none is tested with the README's example."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    expected = "[rank 0] printed by 0\n[rank 1] printed by 1\nafter\n"
    printed, shown = run_on_terminal(script, columns=80)
    assert printed == expected
    lines = shown.split("\r\x1b[K")
    assert lines[0] == lines[-1] == "", "it is empty at the start and at the end"
    began = "2 ranks: 2 importing torch"
    assert began in lines
    assert any(line.endswith("[rank 0] printed by 0") for line in lines)
    waiting = r"\d+ s  2 ranks: 1 waiting in recv \d+\.\d s, 1 computing( \d+ s)?"
    assert any(re.fullmatch(waiting, line) for line in lines)
    assert any(line.endswith(f" s  [rank 1] {'█' * 10}{'░' * 10} 1 of 2") for line in lines)
    assert "\n" not in shown


class Terminal(io.StringIO):
    """A fake stderr: a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal of a number of columns; return what records what is written to it."""

    def terminal(columns: int) -> Terminal:
        size = os.terminal_size((columns, 24))
        monkeypatch.setattr(os, "get_terminal_size", lambda _: size)
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return terminal


HALF = "█" * 10 + "░" * 10


@pytest.mark.parametrize(
    ("columns", "lines", "line"),
    [
        (80, [RankLine("forming the group", 3)] * 2, "2 ranks: 2 forming the group 3 s"),
        (80, [RankLine("computing")] * 2, "2 ranks at work"),
        (80, [RankLine("computing"), RankLine("computing", newest="loss 1")], "[rank 1] loss 1"),
        (80, [RankLine("done"), RankLine("computing")], "2 ranks: 1 done, 1 computing"),
        (80, [RankLine("", None, (at, 4)) for at in (3, 2)], f"[rank 1] {HALF} 2 of 4"),
        (20, [RankLine("computing", newest="x" * 90)], f"[rank 0] {'x' * 10}"),
        (20, [RankLine("computing", newest="語" * 90)], f"[rank 0] {'語' * 5}"),
        (0, [RankLine("computing", newest="x" * 90)], f"[rank 0] {'x' * 70}"),  # nobody knows
    ],
)
def test_the_line_of_a_terminal_shows_one_thing_and_fits(terminal, columns, lines, line):
    shown = terminal(columns)
    view = TerminalView(len(lines))
    view.update(lines)
    view.update(lines)  # the same is not written again
    view.close()
    view.close()
    assert shown.getvalue() == f"\r\x1b[K{line}\r\x1b[K"


def test_a_terminal_shows_since_when_a_run_lasts(terminal, monkeypatch):
    shown, now = terminal(80), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    view = TerminalView(2)
    for now[0], line in ((0.9, RankLine("importing torch")), (61.5, RankLine("computing", 60))):
        view.update([line] * 2)
    view.close()
    lines = ["2 ranks: 2 importing torch", "61 s  2 ranks at work", ""]
    assert shown.getvalue().split("\r\x1b[K")[1:] == lines


# --- as plain data -------------------------------------------------------------------------


def test_ranks_that_do_the_same_are_counted():
    waits = [RankLine(f"waiting in recv(src={src})", src / 10) for src in (31, 1)]
    lines = [*waits, RankLine("computing"), RankLine("raised"), RankLine("computing")]
    assert in_short(lines) == "5 ranks: 2 waiting in recv 3.1 s, 2 computing, 1 raised"
    assert in_short([RankLine("done")]) == "1 rank: 1 done"


def test_many_ranks_have_a_row_for_each_thing_that_they_do():
    waits = [RankLine(f"waiting in recv(src={src})", src / 10) for src in range(1, 20)]
    loops = [RankLine("computing", None, (done, 50), "printed") for done in (40, 7)]
    assert words(as_table("", [*waits, *loops])) == [
        ["19 ranks", "waiting in recv 1.9 s", "", "", ""],
        ["2 ranks", "computing", "", "7 of 50", ""],
    ]
    endless = [RankLine("computing", None, (1200, None))]  # its length is unknown
    assert words(as_table("", endless)) == [["rank 0", "computing", "", "1,200", ""]]
    most = settings.LIVE_ROWS
    assert len(words(as_table("", waits[:most]))) == most


def test_the_heading_says_how_many_ranks_start_or_work_where_and_for_how_long():
    starting = [RankLine("starting"), RankLine("importing torch", 3), RankLine("ready")]
    assert heading(1, [RankLine("starting")]) == "1 rank is starting"
    assert heading(3, starting, 5) == "3 ranks are starting, 5 s"
    assert heading(4, [RankLine("starting under torchrun")] * 2, 0) == (
        "4 ranks are starting, 2 on other hosts"
    )
    assert heading(2, [RankLine("starting"), RankLine("computing")], 1200) == (
        "2 ranks at work, 1,200 s"
    )


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"", ""),
        (b"one\ntwo\n\n  \n", "two"),
        (b"10%\r20%\r30%", "30%"),
        (b"\x1b[1;31mred\x1b[0m\x1b[K \x1b]0;title\x07text\x1b[A\n", "red text"),
        (b"cut short\x1b[3", "cut short"),
        (b"a\x00\x08\tb\x7fc\xc2\x9bd", "a   b c d"),
        ("left\u202eright".encode(), "left right"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"x" * 1000, "x" * 100),
    ],
)
def test_a_line_that_was_printed_cannot_break_the_view(printed, shown):
    assert newest_line(printed) == shown


@pytest.mark.usefixtures("forked_ranks")
def test_only_the_ranks_of_a_run_are_listed_and_counted_after_others_were_lost(monkeypatch, pool):
    titles: list[tuple[int, str]] = []

    class Watching(LiveView):
        def __init__(self, world_size):
            self.world_size = world_size

        def update(self, lines):
            titles.append((len(lines), heading(self.world_size, lines)))

    assert len(pool.run(lambda rank, world_size: None, world_size=3)) == 3
    ranks = pool._processes.ranks
    for rank in ranks:
        rank.psutil.kill()
    wait_until(lambda: not any(rank.alive for rank in ranks), 100, "all ranks were killed")
    monkeypatch.setattr(live_view, "current", View(Watching))
    pool.run(lambda rank, world_size: None, world_size=2)
    assert set(titles) <= {(2, "2 ranks are starting"), (2, "2 ranks at work")}
    assert titles[0] == (2, "2 ranks are starting")


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_forms_a_group_itself_is_shown_so(watch, tmp_path):
    seen: list[list[str]] = []

    def look(lines):
        seen.append([line.doing for line in lines])
        if seen[-1] == ["forming the group", "computing"]:
            (tmp_path / "go").touch()

    def meets(rank, world_size):
        while rank and not (tmp_path / "go").exists():
            time.sleep(0.01)
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)

    watch(look)
    with kit.WorkerPool(2, init=False) as bare:
        bare.run(meets, timeout=60)
    assert ["forming the group", "computing"] in seen


class LoadsUntilSeen:
    """What a rank loads for its worker, until the folder has a file `seen`."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return load_until_seen, (self.folder,)


def load_until_seen(folder):
    Path(folder, "loads").touch()
    while not Path(folder, "seen").exists():
        time.sleep(0.01)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_loads_what_its_worker_needs_is_starting(watch, pool, tmp_path):
    shown: list[str] = []

    def look(lines):
        if shown:  # what the view before it said may be older
            (tmp_path / "seen").touch()
        if (tmp_path / "loads").exists():
            shown.append(lines[0].doing)

    watch(look)
    pool.run(lambda rank, world_size, loaded: None, LoadsUntilSeen(tmp_path), world_size=1)
    assert shown[1] == "starting"


def test_what_is_printed_last_is_shown_also_of_a_flood(watch, tmp_path):
    def flood(rank, world_size):
        print("x" * 10_000_000)
        print("newest")
        while not Path(tmp_path, "seen").exists():
            time.sleep(0.01)

    def look(lines):
        shown.append(lines[0].newest)
        if shown[-1] == "newest":
            Path(tmp_path, "seen").touch()

    shown: list[str] = []
    watch(look)
    kit.run(flood, world_size=1, timeout=60)
    assert shown[-1] == "newest", "what is printed beyond the limit of the output is shown"
    assert set(shown) <= {"", "x" * 100, "newest"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc\n" * 4, ["abc"] * 4),
        ("abc\n" * 5, ["abc", "abc", "... 5 characters are not shown here ...", "abc", "abc"]),
        ("x" * 100, ["x" * 20, "... 60 characters are not shown here ...", "x" * 20]),
        (
            "x" * 40 + "\n... 1,234 bytes left out: 200,000 of a run are kept ...\n" + "x" * 40,
            [
                "x" * 20,
                "... 1,234 bytes and 97 characters are not shown here ...",
                "x" * 20,
            ],
        ),
        ("12%\r" * 50 + "99%\n", ["99%"]),
        ("", []),
    ],
)
def test_of_a_flood_the_first_and_last_are_shown(monkeypatch, capsys, text, shown):
    monkeypatch.setattr(live_view, "current", View(most_lines=4, most_characters=40))
    print_output(["", text], kept=False)
    assert capsys.readouterr().out.splitlines() == [f"[rank 1] {line}" for line in shown]


# --- what is read from the board -----------------------------------------------------------

TEXTS = [["group", "g", [0, 1]], ["count", "recv", 1, 0, 1], ["line", "f", 1, "w", "recv()"]]
CALL = ["call", "recv", "recv", "recv", 1, None, "float32", [], [[1]], [], None, 4, "cpu", []]
NOW = 10**12


def waiting_board(events: int = 1) -> Board:
    """A board on which the newest event, in run 7, is waited for since NOW."""
    board = Board()
    board.begin(7, NOW)
    for text in [*TEXTS, ["call", "send", *CALL[2:]], CALL]:
        board.add_text(text)
    for index in range(events):
        board.post((4 + (index == events - 1), 3, 1, 0, 5), -1, 0, NOW)
    board.begin_wait(events - 1, NOW, False, True)
    return board


def test_a_wait_is_read_as_in_a_snapshot_of_the_whole_board():
    for events in (1, settings.EVENTS_KEPT, settings.EVENTS_KEPT + 3):
        board = waiting_board(events)
        assert read_wait(board, 7, NOW) == ("recv(src=1, tag=5)", NOW)
        assert Snapshot(0, board.read()).waiting.call == "recv(src=1, tag=5)"
        assert read_wait(board, 7, NOW - 1) is None, "the wait is too short"
        assert read_wait(board, 6, NOW) is None, "the wait belongs to another run"
        board.end_wait(events - 1, NOW, True)
        assert read_wait(board, 7, NOW) is None, "the wait is over"
        board.begin(8, NOW)
        for text in [*TEXTS, CALL, ["call", "barrier", "collective", "barrier", *CALL[4:]]]:
            board.add_text(text)
        board.begin_wait(board.post((5, 0, -1, 0, 0), -1, 0, NOW), NOW, False, True)
        assert read_wait(board, 8, NOW) == ("barrier", NOW), "no text of the previous run is shown"
        board.close()


def test_a_rank_that_moves_on_while_it_is_read_does_not_wait(monkeypatch):
    board = waiting_board()
    head = board.head
    heads = [head(), head()._replace(moves=99)]
    monkeypatch.setattr(board, "head", lambda: heads.pop(0))
    assert read_wait(board, 7, NOW) is None
    board.close()
