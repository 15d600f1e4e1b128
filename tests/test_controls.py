"""Pictures with controls: the static form, and a front end that moves sliders on a real kernel."""

from __future__ import annotations

import importlib
import queue
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from kernels import Kernel
from processes import BOUND, assert_gone, wait_until
from torch.distributed import tensor

import ddp_kit as kit
from ddp_kit import lessons
from ddp_kit.lessons import collectives, ddp, partitioned_sgd, ring_allreduce
from ddp_kit.notebook import controls

# An explorer of one number. 7 raises, 8 waits for a file, 9 never ends.
EXPLORER = """
import sys, threading
from ddp_kit.notebook.controls import Explorer

drawn = []

def hold(rank, world_size, number, folder):
    print("a control's run is nobody's cell")
    if number == 7:
        raise ValueError("seven")
    if number > 7:
        pathlib.Path(folder, f"begun {number} {rank} {os.getpid()}").touch()
    while number == 9 or (number == 8 and not pathlib.Path(folder, "go").exists()):
        time.sleep(0.01)
    return {"held": torch.tensor([number])}

def draw(result, settings):
    drawn.append(settings["number"])
    assert threading.current_thread() is threading.main_thread()
    return kit.plot.tensors(result)

def explorer(folder):
    choices = lambda settings: {"number": range(1, 10), "world_size": range(1, 5)}
    ask = lambda settings: (hold, settings["number"], folder)
    settings = {"number": 1, "world_size": 2}
    return Explorer("lesson", settings, choices, ask, draw)
"""

FORGET = """
for widget in list(__import__("ipywidgets").widgets.widget._instances.values()):
    vars(widget.comm).pop("_reply_subshell_id", None)
"""


class FrontEnd:
    """Plays JupyterLab's part: it holds the state of every widget that a kernel has made.

    subshell: send a control's messages to a thread of its own, as JupyterLab does with most
    versions of ipykernel 7; without it the main thread reads them between two cells.
    """

    def __init__(self, kernel: Kernel, subshell: bool = False) -> None:
        self.kernel, self.client = kernel, kernel.client
        self.states: dict[str, dict] = {}
        self.other: list[str] = []  # kinds of messages that a cell's output would be made of
        self.displayed: list[dict] = []
        self._subshell = self._make_subshell() if subshell else None

    def _make_subshell(self) -> str:
        request = self.client.session.msg("create_subshell_request", {})
        self.client.control_channel.send(request)
        reply = self.client.control_channel.get_msg(timeout=BOUND)
        return reply["content"]["subshell_id"]

    def open(self, code: str, **metadata: object) -> None:
        """Run a cell that makes widgets. metadata: what JupyterLab adds to its request."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        request = self.client.session.msg("execute_request", content, metadata=metadata)
        self.client.shell_channel.send(request)
        self.read_until(lambda: self._ended == request["header"]["msg_id"])
        self.other.clear()
        if self._subshell:  # ipykernel 7.4 would have the main thread read the first message
            self.kernel.run(FORGET)

    _ended = None

    def read_until(self, seen: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            try:
                message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"after {seconds} s: {self.states}") from None
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_open":
                self.states[content["comm_id"]] = {}
            if kind in ("comm_open", "comm_msg") and content["comm_id"] in self.states:
                self._update(content["comm_id"], content["data"], message["buffers"])
            elif kind in ("stream", "display_data", "execute_result", "error"):
                self.other.append(kind)
                self.displayed.append(content.get("data", {}))
            elif kind == "status" and content["execution_state"] == "idle":
                self._ended = message["parent_header"].get("msg_id")

    def _update(self, model: str, data: dict, buffers: list) -> None:
        self.states[model] |= data.get("state", {})
        for path, buffer in zip(data.get("buffer_paths", []), buffers, strict=True):
            self.states[model][path[0]] = bytes(buffer)

    def model(self, **state: object) -> str:
        """Find a widget by what it shows."""
        [found] = [m for m, s in self.states.items() if state.items() <= s.items()]
        return found

    def send(self, model: str, data: dict) -> str:
        """Send a control's message; return the message's id."""
        message = self.client.session.msg("comm_msg", {"comm_id": model, "data": data})
        if self._subshell:
            message["header"]["subshell_id"] = self._subshell
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def move(self, name: str, value: object) -> str:
        """Move a slider."""
        model = self.model(description=name)
        self.states[model]["value"] = value
        update = {"method": "update", "state": {"value": value}, "buffer_paths": []}
        return self.send(model, update)

    @property
    def line(self) -> str:
        return self.states[self.model(_model_name="HTMLModel")]["value"]

    @property
    def picture(self) -> bytes:
        return self.states[self.model(_model_name="ImageModel")]["value"]


@pytest.fixture(params=[False, True], ids=["main", "subshell"])
def front(request, shared, tmp_path) -> FrontEnd:
    """The controls of an explorer, in a front end that sends messages this way."""
    shared.run(EXPLORER)
    front = FrontEnd(shared, subshell=request.param)
    front.open(f"view = explorer({str(tmp_path)!r}); view.interact()")
    return front


def begun(folder: Path, number: int) -> list[int]:
    """Return the process ids of the ranks that are in the middle of a run."""
    return [int(path.name.split()[-1]) for path in folder.glob(f"begun {number} *")]


def test_a_slider_runs_again_and_changes_the_picture(front):
    before = front.picture
    front.move("number", 3)
    front.read_until(lambda: front.picture != before)
    front.read_until(lambda: "kit.run(lesson.hold, 3" in front.line)
    assert front.other == []  # neither what the ranks printed nor a live view
    assert front.kernel.value("drawn, view.settings['number']") == "([1, 3], 3)"


def test_a_change_during_a_cell_takes_effect_after_it(front, tmp_path):
    before = front.picture
    cell = front.client.execute(
        f"result = kit.run(hold, 8, {str(tmp_path)!r}, world_size=2)\n"
        "[value['held'].item() for value in result], drawn"
    )
    wait_until(lambda: len(begun(tmp_path, 8)) == 2, 100, "the cell's run has begun")
    front.move("number", 3)
    if front._subshell:
        front.read_until(lambda: "queued" in front.line)
        assert front.picture == before
    (tmp_path / "go").touch()
    front.read_until(lambda: front._ended == cell)
    front.read_until(lambda: front.picture != before)
    assert front.kernel.value("[value['held'].item() for value in result], drawn") == (
        "([8, 8], [1, 3])"
    )


def test_many_quick_wishes_give_few_runs_and_the_last_one_wins(front, tmp_path):
    front.move("number", 8)
    wait_until(lambda: len(begun(tmp_path, 8)) == 2, 100, "the control's run has begun")
    for number in (1, 2, 3, 4, 5, 1, 2, 3, 4, 6):
        last = front.move("number", number)
    if front._subshell:  # else they are read when the run has ended
        front.read_until(lambda: front._ended == last)
    (tmp_path / "go").touch()
    front.read_until(lambda: "kit.run(lesson.hold, 6" in front.line)
    drawn = eval(front.kernel.value("drawn"))
    assert (drawn[:2], drawn[-1]) == ([1, 8], 6)
    assert len(drawn) <= (3 if front._subshell else 7), drawn


def test_an_error_is_reported_in_the_line_and_the_picture_stays(front):
    before = front.picture
    front.move("number", 7)
    front.read_until(lambda: "RankError: ranks 0 and 1 raised ValueError: seven" in front.line)
    assert front.picture == before
    assert front.other == []
    front.move("number", 1)
    front.read_until(lambda: "kit.run(lesson.hold, 1" in front.line)
    front.send(
        front.model(description="Run again"), {"method": "custom", "content": {"event": "click"}}
    )
    front.read_until(lambda: "running on 2 ranks" in front.line)
    front.read_until(lambda: "kit.run(lesson.hold, 1" in front.line)
    assert front.kernel.value("drawn") == "[1, 1]"


@pytest.mark.usefixtures("forked_spawn")
@pytest.mark.parametrize(
    "subshell",
    [pytest.param(False, marks=pytest.mark.long, id="main"), pytest.param(True, id="subshell")],
)
def test_an_interrupt_ends_a_controls_run_forgets_the_next_and_frees_the_ranks(
    kernel, tmp_path, subshell
):
    kernel.run(EXPLORER)
    front = FrontEnd(kernel, subshell)
    front.open(f"view = explorer({str(tmp_path)!r}); view.interact()")
    before = front.picture
    front.move("number", 9)
    wait_until(lambda: len(begun(tmp_path, 9)) == 2, 100, "the control's run has begun")
    ranks = [psutil.Process(pid) for pid in begun(tmp_path, 9)]
    if subshell:  # else the kernel reads it when the run has ended
        front.move("number", 6)
        front.read_until(lambda: "queued" in front.line)
    kernel.manager.interrupt_kernel()
    front.read_until(lambda: "stopped by an interrupt" in front.line, BOUND)
    assert_gone(ranks, "an interrupt")
    assert front.picture == before
    assert kernel.value("list(kit.run(lambda rank, world_size: rank, world_size=2))") == "[0, 1]"
    assert kernel.value("drawn") == "[1]"
    kernel.manager.interrupt_kernel()  # between two cells the kernel ignores it
    assert kernel.value("list(kit.run(lambda rank, world_size: rank, world_size=2))") == "[0, 1]"


def test_sliders_follow_the_world_size_and_hide_where_they_have_no_effect(shared):
    front = FrontEnd(shared)
    front.open(
        "from ddp_kit.lessons import collectives\n"
        "view = collectives.explore('reduce', root=3); view.interact()"
    )
    root = front.model(description="root")
    layout = front.states[root]["layout"].removeprefix("IPY_MODEL_")
    front.move("world_size", 2)
    front.read_until(lambda: "kit.run(collectives.reduce, 'SUM', 1, world_size=2)" in html(front))
    assert (front.states[root]["max"], front.states[root]["value"]) == (1, 1)
    assert front.states[layout]["display"] is None
    names = front.states[front.model(description="collective")]
    front.send(
        front.model(description="collective"),
        {"method": "update", "state": {"index": names["_options_labels"].index("all_gather")}},
    )
    front.read_until(lambda: "kit.run(collectives.all_gather, world_size=2)" in html(front))
    assert front.states[layout]["display"] == "none"


def html(front: FrontEnd) -> str:
    return front.line.replace("&#x27;", "'")


def test_the_ring_is_shown_step_by_step_without_another_run(shared):
    front = FrontEnd(shared)
    front.open(
        "from ddp_kit.lessons import ring_allreduce\n"
        "view = ring_allreduce.explore(3); first = view.result; view.interact()"
    )
    pictures = [front.picture]
    play, step = front.model(_model_name="PlayModel"), front.model(description="step")
    assert (front.states[play]["max"], front.states[step]["max"]) == (4, 4)
    front.move("step", 2)
    front.read_until(lambda: front.picture not in pictures)
    assert shared.value("view.result is first") == "True"
    front.move("world_size", 2)
    front.read_until(lambda: "watch, world_size=2" in front.line)
    assert (front.states[play]["max"], front.states[step]["max"]) == (2, 2)


def test_sliders_of_a_formula_draw_it_again_and_run_nothing(shared):
    front = FrontEnd(shared)
    front.open(
        "from ddp_kit.lessons import ring_allreduce\n"
        "view = ring_allreduce.explore_formula(ranks=4); view.interact()"
    )
    before = front.picture
    front.move("ranks", 2)
    front.read_until(lambda: front.picture != before)
    assert shared.value("repr(view).splitlines()[0]") == repr(
        "2 ranks, 50 µs and 0.1 ns per byte: the whole ring is never slower (ms)"
    )
    assert shared.value("view.result is None and view.call") == "''"


def test_a_cell_of_jupyterlab_shows_controls_below_the_picture(shared, tmp_path):
    shared.run(EXPLORER)
    front = FrontEnd(shared)
    front.open(f"view = explorer({str(tmp_path)!r}); view", cellId="a")
    picture, controls = filter(None, front.displayed)  # the live view leaves an empty one
    assert set(picture) == {"image/png", "text/plain"}
    view = "application/vnd.jupyter.widget-view+json"
    assert set(controls) == {view, "text/plain"}
    assert controls["text/plain"].startswith("Menus and sliders appear here")
    assert controls[view]["model_id"] in front.states
    layout = front.states[front.model(_model_name="ImageModel")]["layout"]
    layout = front.states[layout.removeprefix("IPY_MODEL_")]
    assert layout["display"] == "none"  # the picture is above
    before = front.picture
    front.move("number", 3)
    front.read_until(lambda: layout["display"] is None)
    assert front.picture != before
    assert shared.value("drawn") == "[1, 3]"


@pytest.mark.usefixtures("forked_spawn")
def test_ipywidgets_is_loaded_only_when_controls_are_asked_for_and_not_by_nbval(kernel):
    kernel.run("import sys\nfrom ddp_kit.lessons import ring_allreduce")
    loaded = "'ipywidgets' in sys.modules"
    cell = kernel.run("view = ring_allreduce.explore(1); view")
    [shown] = filter(None, (c["data"] for c in cell.contents("display_data", "execute_result")))
    assert set(shown) == {"image/png", "text/plain"}
    assert kernel.value(loaded) == "False"
    kernel.run("view.interact()")
    assert kernel.value(loaded) == "True"


def test_a_static_picture_is_a_png_with_its_numbers_as_text():
    view = collectives.explore("scatter", world_size=2, root=1)
    assert repr(view) == (
        "scatter(src=1) on 2 ranks\n"
        "        before   after\n"
        "rank 0  \N{EN DASH}        10\n"
        "rank 1  10 | 11  11"
    )
    assert view._repr_png_().startswith(b"\x89PNG")
    assert view.call == "kit.run(collectives.scatter, 1, world_size=2)"


FILES = Path(lessons.__file__).parent.glob("[!_]*.py")
LESSONS = sorted(file.stem for file in FILES if re.search(r"\bexplore\b", file.read_text("utf-8")))


@pytest.mark.parametrize("name", LESSONS)
def test_the_call_below_a_picture_is_the_one_that_was_made(name, monkeypatch):
    made = []

    def noting_run(*args, **options):
        made.append((args, options))
        return run(*args, **options)

    run = controls.run
    monkeypatch.setattr(controls, "run", noting_run)
    module = importlib.import_module(f"ddp_kit.lessons.{name}")
    view = module.explore(world_size=2)
    shown = SimpleNamespace(run=lambda *args, **options: (args, options))
    assert eval(view.call, vars(tensor) | {"kit": shown, name: module}) == made[0]


def test_controls_outside_a_notebook_are_refused():
    with pytest.raises(kit.PoolError, match="call interact\\(\\) in one of its cells"):
        ring_allreduce.explore(1).interact()


@pytest.mark.parametrize(
    ("explore", "message"),
    [
        (lambda: collectives.explore("sum"), "collective must be one of broadcast, scatter,"),
        (lambda: collectives.explore(root=4), "root must be one of 0, 1, 2, 3, got 4"),
        (lambda: collectives.explore(world_size=0), "world_size must be at least 1, got 0"),
        (lambda: ddp.explore(world_size="2"), "world_size must be a whole number such as 4"),
        (lambda: partitioned_sgd.explore(lr=float("nan")), "lr must be a positive number, got nan"),
    ],
)
def test_an_impossible_setting_is_refused_in_one_sentence(explore, message):
    with pytest.raises(kit.PoolError) as caught:
        explore()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
