"""The kit in a real Jupyter kernel."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
import pytest
from kernels import ROOT
from nbconvert import HTMLExporter

from ddp_kit.lessons import point_to_point

# --- functions of cells --------------------------------------------------------------------


def test_what_a_cell_defines_runs_and_a_redefinition_replaces_it(shared):
    shared.run(
        "def worker(rank, world_size):\n"
        "    return helper(rank)\n"
        "def helper(rank):\n"
        "    return rank + 1\n"
    )
    assert shared.value("list(kit.run(worker, world_size=2))") == "[1, 2]"
    shared.run("def helper(rank):\n    return rank + 10")
    assert shared.value("list(kit.run(worker, world_size=2))") == "[10, 11]"
    shared.run("def worker(rank, world_size):\n    return -helper(rank)")
    assert shared.value("list(kit.run(worker, world_size=2))") == "[-10, -11]"


def test_classes_closures_and_modules_of_cells_run_on_ranks(shared):
    shared.run(
        "class Scale:\n"
        "    def __init__(self, by):\n"
        "        self.by = by\n"
        "    def __call__(self, rank, world_size):\n"
        "        return rank * self.by\n"
        "def closure(by):\n"
        "    return lambda rank, world_size: rank * by\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.tensor(3.0))\n"
        "    def forward(self, x):\n"
        "        return self.weight * x\n"
        "def use(rank, world_size, net):\n"
        "    return net(torch.tensor(float(rank))).item(), Net()(torch.tensor(2.0)).item()\n"
        "net = Net()"
    )
    assert shared.value("list(kit.run(Scale(5), world_size=2))") == "[0, 5]"
    assert shared.value("list(kit.run(closure(6), world_size=2))") == "[0, 6]"
    assert shared.value("list(kit.run(lambda r, w: r * 7, world_size=2))") == "[0, 7]"
    assert shared.value("list(kit.run(use, net, world_size=2))") == "[(0.0, 6.0), (3.0, 6.0)]"
    shared.run("Net.forward = lambda self, x: x - 1")
    assert shared.value("list(kit.run(use, net, world_size=2))") == "[(-1.0, 1.0), (0.0, 1.0)]"


def test_an_instance_of_a_cells_class_comes_back_as_one(shared):
    shared.run("class Point:\n    pass")
    shared.run("result = kit.run(lambda rank, world_size: Point(), world_size=2)")
    assert shared.value("[type(value) is Point for value in result]") == "[True, True]"


OF_CELLS = """
import collections, dataclasses, enum, io, multiprocessing, pickle
from concurrent.futures import ProcessPoolExecutor

@dataclasses.dataclass
class Config:
    size: "int"
    more: "Batch" = None

class Color(enum.Enum):
    RED = 1

class Outer:
    class Inner:
        pass

class Net(torch.nn.Module):
    def forward(self, x):
        return x

Batch = collections.namedtuple("Batch", "x y")
def square(x):
    return x * x

def collate(items):
    return Batch(sum(items), 0)

def gather(rank, world_size):
    mine = [Config(rank), Color.RED, Batch(rank, 1), Outer.Inner, Net, square]
    all = [None] * world_size
    dist.all_gather_object(all, mine)
    return [got[1:2] + got[3:] == mine[1:2] + mine[3:] for got in all]

def save(rank, world_size):
    file = io.BytesIO()
    torch.save(Net(), file)
    file.seek(0)
    return type(torch.load(file, weights_only=False)) is Net

def start(rank, world_size):
    with multiprocessing.Pool(1) as pool, ProcessPoolExecutor(1) as executor:
        return [*pool.map(square, [2]), *executor.map(square, [3])]

def load(rank, world_size):
    loader = torch.utils.data.DataLoader([1, 2], batch_size=2, num_workers=1, collate_fn=collate)
    return [batch.x for batch in loader]

def only_passed(rank, world_size, value):
    return type(pickle.loads(pickle.dumps(value))) is type(value)

def define(rank, world_size):
    class Warm:
        color = Color.RED
        class Rate:
            name = LABEL
    return Warm.color.name + Warm.Rate.name

LABEL = "dy"

def left(rank, world_size):
    import __main__
    return [name for name in vars(__main__) if not name.startswith("__")]
"""


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("gather", [True, True]),
        ("save", True),
        ("start", [4, 9]),
        ("load", [3]),
        ("only_passed, Outer.Inner()", True),
        ("define", "REDdy"),
        ("left", ["left"]),  # of all that earlier runs had
    ],
)
def test_the_main_module_of_a_rank_has_what_the_cells_defined(shared, call, result):
    shared.run(OF_CELLS)
    assert shared.value(f"list(kit.run({call}, world_size=2, timeout=60))") == repr([result] * 2)


def test_a_pushed_value_comes_with_its_class(shared):
    shared.run("%load_ext ddp_kit\nclass Pushed:\n    pass\npushed = Pushed()")
    shared.run("%ranks push pushed")
    shared.run("%%ranks -n 2\nimport pickle\npickle.loads(pickle.dumps(pushed))")
    shared.run("%ranks reset")


# --- sys.argv and exit() of a kernel ---------------------------------------------------------


def test_a_worker_parses_no_arguments_of_the_kernel(shared):
    shared.run(
        "import argparse, sys\n"
        "def parse(rank, world_size):\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--lr', type=float, default=0.1)\n"
        "    return parser.parse_args().lr\n"
    )
    assert shared.value("list(kit.run(parse, world_size=2))") == "[0.1, 0.1]"
    shared.run("before, sys.argv = sys.argv, ['train.py', '--lr', '0.5']")
    assert shared.value("list(kit.run(parse, world_size=2))") == "[0.5, 0.5]"
    shared.run("sys.argv = before")


def test_exit_and_quit_of_a_notebook_leave_the_worker(shared):
    shared.run("def leave(rank, world_size):\n    exit(0) if rank else quit()")
    assert shared.value("list(kit.run(leave, world_size=2))") == "[None, None]"


# --- %run ----------------------------------------------------------------------------------

SCRIPT = """
import os
import ddp_kit as kit

with open({marks!r}, "a") as marks:
    marks.write(f"{{os.getpid()}} ")

def work(rank, world_size):
    return helper(rank)

def helper(rank):
    return 100 + rank

"""
GUARD = 'if __name__ == "__main__":\n    '
CALL = "print(*kit.run(work, world_size=2))\n"


@pytest.mark.parametrize("guard", [GUARD, ""], ids=["guarded", "unguarded"])
@pytest.mark.parametrize("option", ["", "-i"], ids=["plain", "-i"])
def test_a_script_under_percent_run_runs_in_the_notebook_only(shared, tmp_path, guard, option):
    marks = tmp_path / "marks"
    # In the kernel's own folder, a rank could import the script by its name.
    folder = Path(shared.process.cwd())
    script = folder / f"script_{'guarded' if guard else 'unguarded'}.py"
    script.write_text(SCRIPT.format(marks=str(marks)) + guard + CALL)
    for times in (1, 2):
        cell = shared.run(f"%run {option} {script}")
        assert cell.stdout == "100 101\n"
        assert marks.read_text() == f"{shared.process.pid} " * times
        shared.run("def own(rank, world_size):\n    return rank * 3")
        assert shared.value("list(kit.run(own, world_size=2))") == "[0, 3]"
        assert shared.value("list(kit.run(work, world_size=2))") == "[100, 101]"
        assert marks.read_text() == f"{shared.process.pid} " * times


START = "with kit.WorkerPool(1) as own:\n    own.run(lambda rank, world_size: None)\n"


@pytest.mark.parametrize("command", ["{}.py inside", "-i {}.py", "-m {}"])
def test_ranks_that_start_in_or_after_a_script_do_not_execute_it(shared, tmp_path, command):
    marks = tmp_path / "marks"
    script = Path(shared.process.cwd()) / "starting.py"
    begin = "import sys\nif 'inside' in sys.argv:\n    "
    script.write_text(SCRIPT.format(marks=str(marks)) + begin + START.replace("\n", "\n    "))
    shared.run(f"%run {command.format(script.stem)}")
    if "inside" not in command:
        shared.run(START)  # with -i and -m, the script is still sys.modules["__main__"]
    assert marks.read_text() == f"{shared.process.pid} "


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("-m ddp_kit.lessons.point_to_point", 4),
        # Without the two dashes, %run takes the option for its own.
        ("-m ddp_kit.lessons.point_to_point -- --world-size 2", 2),
        (point_to_point.__file__, 4),
    ],
    ids=["module", "module with an option", "path"],
)
def test_a_lesson_under_percent_run_works_twice_and_later_cells_too(shared, command, ranks):
    for _ in range(2):
        cell = shared.run(f"%run {command}")
        expected = f"point_to_point: {ranks} ranks, every tensor arrived as it was sent\n"
        assert cell.stdout == expected
        shared.run("def own(rank, world_size):\n    return rank * 3")
        assert shared.value("list(kit.run(own, world_size=2))") == "[0, 3]"


def test_a_lesson_under_percent_run_leaves_the_names_of_cells_alone(shared):
    shared.run("def blocking():\n    return 'my own'")
    cell = shared.run("%run -m ddp_kit.lessons.point_to_point -- --world-size 2")
    assert (cell.stdout.count("\n"), cell.stderr) == (1, "")
    assert shared.value("blocking()") == "'my own'"


# --- errors --------------------------------------------------------------------------------

FAILING = """# the first line of the cell
def inner(rank):
    if rank == 1:
        raise ValueError("boom")

def worker(rank, world_size):
    inner(rank)

kit.run(worker, world_size=2)
"""


def test_a_failing_rank_is_reported_with_the_lines_of_its_cell(shared):
    shared.run("1")  # so that the second report comes from a cell with another number
    first, second = shared.raises(FAILING), shared.raises(FAILING)
    for cell in (first, second):
        number = cell.contents("execute_input")[0]["execution_count"]
        assert cell.error["ename"] == "RankError"
        assert cell.error["evalue"] == (
            'rank 1 raised ValueError: boom\n    line 4 of inner: raise ValueError("boom")'
        )
        assert cell.rendered.rstrip() == (
            "RankError:\n"
            "rank 1 raised ValueError: boom\n"
            f"  Cell In[{number}], line 7, in worker\n"
            "    inner(rank)\n"
            f"  Cell In[{number}], line 4, in inner\n"
            '    raise ValueError("boom")'
        )
        assert cell.stderr == ""


@pytest.mark.usefixtures("forked_spawn")
def test_a_deadlock_reads_as_in_the_readme_below_its_picture(kernel):
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    stuck = readme[readme.index("## When a run is stuck") :]
    code, error = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", stuck, re.DOTALL).groups()
    cell = kernel.raises(code)
    assert re.sub(r"In\[\d+\]", "In[2]", cell.rendered) == error.rstrip()
    pictures = [c["data"] for c in cell.contents("display_data") if "image/png" in c["data"]]
    assert len(pictures) == 1
    assert pictures[0]["text/plain"].startswith("Ranks 0 and 1 wait for each other")
    kinds = [kind for kind, _ in cell.messages]
    assert kinds.index("error") == len(kinds) - 2, "the picture comes before the error"


def test_a_function_of_an_earlier_cell_fails_in_that_cell(shared):
    defined = shared.run("def worker(rank, world_size):\n\n    return 1 / 0")
    number = defined.contents("execute_input")[0]["execution_count"]
    shared.run("worker")
    cell = shared.raises("kit.run(worker, world_size=2)")
    assert "ranks 0 and 1 raised ZeroDivisionError: division by zero" in cell.rendered
    assert f"Cell In[{number}], line 3, in worker\n    return 1 / 0" in cell.rendered


# --- what a run shows ----------------------------------------------------------------------


def test_pictures_are_loaded_while_ranks_run(shared, tmp_path):
    loaded = tmp_path / "loaded"
    cell = shared.run(
        f"loaded = pathlib.Path({str(loaded)!r})\n"
        "def waits(rank, world_size):\n"
        "    while not loaded.exists():\n"
        "        time.sleep(0.01)\n"
        "def watch():\n"
        "    deadline = time.monotonic() + 60\n"
        "    while 'ddp_kit.plot' not in sys.modules and time.monotonic() < deadline:\n"
        "        time.sleep(0.01)\n"
        "    loaded.touch()\n"
        "import sys, threading\n"
        "threading.Thread(target=watch).start()\n"
        "kit.run(waits, timeout=120)\n"
        "print('ddp_kit.plot' in sys.modules)"
    )
    assert cell.stdout == "True\n"


def test_what_ranks_write_outside_python_appears_in_the_ranks_block(shared):
    cell = shared.run("kit.run(lambda r, w: os.system('echo shell; echo error >&2'), world_size=2)")
    assert cell.stdout == "".join(f"[rank {r}] shell\n[rank {r}] error\n" for r in range(2))


def still_picture_in_html(output: dict) -> bool:
    """Return whether nbconvert, and so a book, shows the PNG of an output instead of a widget."""
    cell = nbformat.v4.new_code_cell("picture.interact()", outputs=[nbformat.from_dict(output)])
    html, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    return "data:image/png;base64" in html and "widget-view" not in html


def test_a_cell_shows_a_widget_and_keeps_the_still_picture_with_its_text(shared):
    shared.run(
        "def exchange(rank, world_size):\n"
        "    dist.all_reduce(torch.ones(3))\n"
        "picture = kit.plot.timeline(kit.run(exchange, world_size=2))"
    )
    cell = shared.run("picture.interact()")
    [shown] = cell.contents("execute_result")
    data = shown["data"]
    assert set(data) == {
        "text/plain",
        "image/png",
        "application/vnd.jupyter.widget-view+json",
    }
    assert data["text/plain"] == shared.value("picture")
    assert data["text/plain"].startswith("1 collective on 2 ranks, step by step\n")
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert still_picture_in_html({"output_type": "execute_result", **shown})
    [opened] = [each for each in cell.contents("comm_open") if each["data"]["buffer_paths"]]
    state = opened["data"]["state"]
    assert state["_model_module"] == "anywidget"
    assert state["calls"][0]["line"].endswith("line 2, in exchange")
    assert state["calls"][0]["line"].startswith("Cell In[")
    assert opened["data"]["buffer_paths"] == [["rows"]]


def test_torchvision_before_mnist_and_mnist_in_a_rank(shared):
    shared.run("import torchvision")
    assert shared.value("len(kit.mnist()), kit.mnist()[0][0].shape") == (
        "(10000, torch.Size([1, 28, 28]))"
    )
    assert shared.value("len(kit.mnist(train=False))") == "2000"
    labels = shared.value("[kit.mnist()[rank][1] for rank in range(2)]")
    shared.run("digits = kit.mnist()")
    for worker in ("lambda r, w: kit.mnist()[r][1]", "lambda r, w: digits[r][1]"):
        assert shared.value(f"list(kit.run({worker}, world_size=2))") == labels


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--world-size 0", "PoolError: world_size must be at least 1, got 0"),
        (
            "--worldsize 2",
            "PoolError: unrecognized arguments: --worldsize 2; --help lists the options",
        ),
    ],
)
def test_a_wrong_option_of_a_lesson_is_one_line(shared, options, expected):
    cell = shared.send(f"%run -m ddp_kit.lessons.point_to_point -- {options}").finish()
    assert cell.rendered == expected
    assert "Unknown failure" not in cell.stderr
