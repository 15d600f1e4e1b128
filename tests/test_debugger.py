"""`%ranks debug`: what a rank captures when it raises, and how a notebook shows it.

Most captures are made in this process, from an exception of a function below.
"""

from __future__ import annotations

import collections
import gc
import pickle
import re
import sys
import weakref

import numpy as np
import pytest
import torch
from kernels import ROOT

import ddp_kit as kit
from ddp_kit.pool import last_failed_run
from ddp_kit.pool.rank import post_mortem
from ddp_kit.pool.rank.post_mortem import capture
from ddp_kit.pool.wire.messages import Captured


def captured(function, *args) -> Captured:
    """Return what is captured when `function` raises."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any type
        function(*args)
    return pickle.loads(capture(raised.value))


def variables(*values) -> list:
    """Return what is captured of each of these values in a function that raises."""

    def fails(value):
        raise ValueError

    return [captured(fails, value).frames[-1].locals["value"] for value in values]


# --- in a rank: what is captured ---------------------------------------------------------------


def test_plain_values_and_small_tensors_are_captured_whole():
    values = [3, 2.5, "text", None, True, [1, {"a": (2, {4})}], torch.float16, torch.Size([2, 3])]
    assert variables(*values) == values
    leaf = torch.tensor([1.0, float("nan")], requires_grad=True)
    (leaf * 2).sum().backward()
    for tensor in (
        leaf,
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(3),
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
    ):
        (copy,) = variables(tensor)
        assert type(copy) is torch.Tensor
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert repr(copy) == repr(tensor.detach().clone().requires_grad_(tensor.requires_grad))
    (copy,) = variables(leaf)
    assert copy.grad.tolist() == [2, 2]
    (copy,) = variables(torch.nn.Parameter(torch.ones(2)))
    assert type(copy) is torch.nn.Parameter


def test_a_large_tensor_is_summarized_with_its_nans():
    tensor = torch.arange(260_000.0)
    tensor[5:8] = float("nan")
    (summary,) = variables(tensor)
    assert repr(summary) == (
        "<Tensor of shape (260000,), float32: from 0 to 2.6e+05, mean 1.3e+05, 3 NaN, "
        "beginning with 0, 1, 2>"
    )
    assert summary.shape == (260_000,)
    assert summary.dtype is torch.float32
    halves, flags, nothing, meta, sparse = variables(
        torch.full((1_000, 1_000), 0.5, dtype=torch.bfloat16),
        torch.arange(1_040_000) > 1_039_990,
        torch.full((260_000,), float("nan")),
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
    )
    assert "bfloat16: from 0.5 to 0.5, mean 0.5, beginning with 0.5, 0.5, 0.5" in repr(halves)
    assert "bool: from 0 to 1, mean 8.654e-06, beginning with False, False, False" in repr(flags)
    assert "float32: 260,000 NaN, beginning with nan" in repr(nothing)
    assert repr(meta) == "<Tensor of shape (3,), float32 on meta>"
    assert repr(sparse) == "<Tensor of shape (3, 3), float32>"


def test_a_megabyte_of_each_function_is_captured():
    def inner(batch):
        losses, text, array = [0.5] * 5_000, "x" * 9_000, np.ones(1_000)
        raise ValueError((batch.sum(), losses, text, array))

    def outer(first):
        second, small = torch.ones(40, 6_264), 3
        inner(second[:30, :6_000].contiguous() + small)

    *_, caller, last = captured(outer, torch.ones(1)).frames
    assert last.locals["batch"].sum() == 4 * 30 * 6_000
    assert last.locals["losses"] == [0.5] * 5_000
    assert (last.locals["text"], last.locals["array"].sum()) == ("x" * 9_000, 1_000)
    assert (caller.locals["first"], caller.locals["small"]) == (1, 3)
    assert repr(caller.locals["second"]).startswith("<Tensor of shape (40, 6264), float32: from 1")
    with pytest.raises(TypeError, match="captured whole up to 1 MB a function"):
        caller.locals["second"] + 1


def test_objects_are_summarized_with_their_attributes():
    class Config:
        def __init__(self):
            self.lr, self.layers = 0.1, [1, 2]

    Point = collections.namedtuple("Point", "x y")
    names = [repr(value) for value in variables(Config(), Point(1, 2), len, Config, sys)]
    assert names == [
        "<Config: lr=0.1, layers=[1, 2]>",
        "<Point of 2 items: (1, 2) ...>",
        "<function len>",
        "<class Config>",
        "<module sys>",
    ]
    config, model, error = variables(Config(), torch.nn.Linear(2, 1), ValueError("why"))
    assert (config.lr, config.layers) == (0.1, [1, 2])
    assert (model.in_features, model.weight.shape, error.args) == (2, (1, 2), ("why",))
    for use in (lambda: config == 1, lambda: bool(config), lambda: config * 2, lambda: config[0]):
        with pytest.raises(TypeError, match="only a summary of this Config was captured"):
            use()
    with pytest.raises(AttributeError, match="no attribute 'step' of this Config was captured"):
        config.step  # noqa: B018


def test_no_code_of_the_learner_runs_while_it_is_captured():
    ran = []

    def note(*args, **kwargs):
        ran.append(args)
        raise RuntimeError

    special = "__repr__ __str__ __getattr__ __getattribute__ __len__ __iter__ __eq__ __hash__"
    special += " __reduce__ __reduce_ex__ __getstate__ __bool__ __sizeof__ __format__ __dir__"
    code = dict.fromkeys(special.split(), note)
    hidden = {"__class__": property(note), "value": property(note)}
    bases = [object, list, dict, str, int, torch.nn.Module, ValueError]
    hostile = [type("Hostile", (base,), code | hidden) for base in bases]
    torch_function = {"__torch_function__": classmethod(note)}
    data = [cls.__new__(cls) for cls in hostile]
    data.append(torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), torch_function)))
    (summaries,) = variables(data)
    assert not ran
    assert [repr(one).split()[0].strip("<>:") for one in summaries] == ["Hostile"] * 7 + ["Mine"]


def test_the_limits_hold_for_each_function():
    def inner(text):
        first, second = [text] * 3_000, torch.ones(10)  # noqa: F841
        raise ValueError

    def outer():
        much = {number: torch.ones(2_000) for number in range(200)}  # noqa: F841
        more = {number: torch.ones(2_000) for number in range(200)}  # noqa: F841
        inner("x" * 900)

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        outer()
    sent = capture(raised.value)
    assert len(sent) < 3 * post_mortem.SIZE
    *_, caller, last = pickle.loads(sent).frames
    assert last.locals["second"].tolist() == [1] * 10
    assert "<Tensor" not in repr(caller.locals["much"][0])
    assert "<Tensor" in repr(caller.locals["more"])

    deep = [[[[[[["far"]]]]]]]
    cycle = []
    cycle.append(cycle)
    many = dict.fromkeys(range(9_999))
    shown = variables(deep, cycle, list(range(10_000)), "x" * 2_000_000, many)
    assert repr(shown[0]) == "[[[[[<list>]]]]]"
    assert repr(shown[1]) == "[[[[[<list>]]]]]"
    assert repr(shown[2]) == "<list of 10,000 items: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] ...>"
    assert repr(shown[3]).startswith("<str of 2,000,000 characters: 'xxx")
    assert repr(shown[4]).startswith("<dict of 9,999 items: {0: None, 1: None")


def test_a_deep_recursion_is_captured_at_its_inner_end():
    def recurse(depth):
        if depth == 100:
            raise ValueError
        recurse(depth + 1)

    depths = [frame.locals["depth"] for frame in captured(recurse, 0).frames]
    assert depths == list(range(81, 101))


def test_closures_generators_and_the_frames_of_the_top_exception_are_captured():
    outside = 7

    def numbers():
        for number in range(9):
            yield 1 / (3 - number) + outside

    frames = captured(lambda: list(numbers())).frames
    assert frames[-1].function == "numbers"
    assert frames[-1].locals == {"number": 3, "outside": 7}

    def convert(text):
        try:
            return int(text)
        except ValueError as error:
            kept = error  # noqa: F841
            raise RuntimeError("no number") from error

    last = captured(convert, "seven").frames[-1]
    assert last.function == "convert"
    assert last.locals["text"] == "seven"
    assert repr(last.locals["kept"]).startswith("<ValueError: args=")


def test_a_tensor_whose_memory_was_freed_is_described_without_its_values():
    whole = torch.arange(8.0)
    part = whole[4:]
    whole.untyped_storage().resize_(20)  # as FSDP frees the memory of whole parameters
    summaries = variables(whole, part, part[:1])
    assert [repr(each) for each in summaries] == [
        "<Tensor of shape (8,), float32>",
        "<Tensor of shape (4,), float32>",
        "tensor([4.])",
    ]


def test_a_failing_capture_is_empty_and_only_the_learners_functions_are_in_one(monkeypatch):
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 3)(torch.ones(5))  # raises in functions of PyTorch
    (frame,) = pickle.loads(capture(raised.value)).frames
    assert frame.function == sys._getframe().f_code.co_name
    assert capture(ValueError("without a traceback")) == b""
    monkeypatch.setattr(post_mortem, "is_own", lambda file: 1 / 0)
    assert capture(raised.value) == b""


def test_nothing_of_the_frames_is_kept_alive(monkeypatch):
    class Held:
        pass

    made = {"Held": Held, "alive": [], "ref": weakref.ref}
    source = "def fails():\n held = Held()\n alive.append(ref(held))\n raise ValueError"
    exec(compile(source, "a cell", "exec"), made)
    # The function that catches the exception is not the learner's in a rank either.
    monkeypatch.setattr(post_mortem, "is_own", lambda file: file == "a cell")
    gc.collect()
    gc.disable()  # nothing may need it
    try:
        try:
            made["fails"]()
        except ValueError as error:
            sent = capture(error)
        assert list(pickle.loads(sent).frames[0].locals) == ["held"]
        assert made["alive"][0]() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu_is_copied_unless_the_gpu_is_busy():
    def fails(tensor):
        raise ValueError

    small = torch.arange(3, device="cuda")
    found = captured(fails, small)
    assert found.from_gpu
    assert found.frames[-1].locals["tensor"].tolist() == [0, 1, 2]
    torch.cuda._sleep(2_000_000_000)
    found = captured(fails, small)
    torch.cuda.synchronize()
    assert repr(found.frames[-1].locals["tensor"]) == "<Tensor of shape (3,), int64 on cuda:0>"


# --- what travels, and what does not -----------------------------------------------------------


def fails(rank, world_size, password):
    mine = torch.full((2,), float(rank))
    if rank == 1:
        raise ValueError("boom")
    return mine


def test_variables_come_from_every_launcher_and_stay_out_of_the_error(pool):
    with pytest.raises(kit.RankError) as raised:
        pool.run(fails, "secret-7731")
    last = last_failed_run()
    assert list(last.captured) == [1]
    frame = pickle.loads(last.captured[1]).frames[-1]
    assert list(frame.locals) == ["rank", "world_size", "password", "mine"]
    assert frame.locals["mine"].tolist() == [1, 1]
    assert frame.locals["password"] == "secret-7731"
    error = raised.value
    assert b"secret-7731" not in pickle.dumps(error)
    assert "secret-7731" not in f"{error}{error!r}{vars(error)}"
    with pytest.raises(kit.RankError):
        kit.torchrun(fails, "other", nproc_per_node=2)
    frame = pickle.loads(last_failed_run().captured[1]).frames[-1]
    assert frame.locals["password"] == "other"


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_that_fails_otherwise_takes_the_place_of_an_older_one(pool):
    with pytest.raises(kit.RankError):
        pool.run(fails, "old")
    assert last_failed_run().captured
    with pytest.raises(kit.PoolError, match="cannot be rebuilt"):
        pool.run(returns_what_cannot_be_rebuilt)
    assert last_failed_run() == ("PoolError", {}, {})


class OnlyInTheRank:
    def __reduce__(self):
        return int, ("no number",)


def returns_what_cannot_be_rebuilt(rank, world_size):
    return OnlyInTheRank()


# --- in the notebook ---------------------------------------------------------------------------

SET_UP = """
%reload_ext ddp_kit
def share(total, parts):
    big = torch.ones(600, 600)
    return total / parts

def worker(rank, world_size):
    weights = torch.tensor([1.0, 2.0]) * rank
    if rank % 2:
        share(weights, [])
"""


@pytest.fixture(scope="module")
def notebook(shared):
    """A kernel in which ranks 1 and 3 have raised, after one in which nothing had."""
    shared.run("%load_ext ddp_kit")
    nothing = shared.raises("%ranks debug")
    assert nothing.rendered == (
        "PoolError: %ranks debug shows ranks that raised, and no run has failed yet"
    )
    shared.cell = shared.run(SET_UP).contents("execute_input")[0]["execution_count"]
    shared.raises("kit.run(worker, world_size=4)")
    return shared


def test_commands_are_asked_for_and_answered_as_by_pdb(notebook):
    cell = notebook.send("%ranks debug 3")
    for reply in ["p nothing", "up", "step", "q"]:
        assert cell.asked() == "(rank 3) "
        notebook.client.input(reply)
    cell.finish()
    assert (cell.error, cell.stderr) == (None, "")
    place = f"> Cell In[{notebook.cell}]"
    assert cell.stdout.splitlines() == [
        f"{place}, line 4, in share",
        "-> return total / parts",
        "*** NameError: name 'nothing' is not defined",
        f"{place}, line 9, in worker",
        "-> share(weights, [])",
        "*** unavailable, because the rank has gone on; help lists the commands",
    ]


def test_commands_may_stand_in_the_line(notebook):
    cell = notebook.run("%ranks debug where ;; p torch.ones(2) + total, big.shape, ';' ;; locals")
    place = f"Cell In[{notebook.cell}]"
    where = [f"> {place}, line 4, in share", "-> return total / parts"]
    assert cell.stdout.splitlines() == [
        *where,
        f"  {place}, line 9, in worker",
        "-> share(weights, [])",
        *where,
        "(tensor([2., 3.]), torch.Size([600, 600]), ';')",
        "total = tensor([1., 2.])",
        "parts = []",
        "big = <Tensor of shape (600, 600), float32: from 1 to 1, mean 1, beginning with 1, 1, 1>",
    ]
    helped = notebook.run("%ranks debug 1 help").stdout
    assert {"where", "locals", "whatis", "pp"} <= set(helped.split())
    assert not {"step", "break", "until"} & set(helped.split())


def test_without_a_reader_a_line_says_where_commands_may_stand(notebook):
    cell = notebook.send("%ranks debug 1", allow_stdin=False).finish()
    assert cell.error is None
    assert cell.stdout.endswith("They may follow the rank: %ranks debug 1 where ;; locals\n")


def test_an_interrupt_ends_the_debugger(notebook):
    cell = notebook.send("%ranks debug 1")
    cell.asked()
    notebook.manager.interrupt_kernel()
    cell.finish()
    assert cell.error is None
    assert notebook.value("1 + 1") == "2"


def test_a_rank_that_cannot_be_debugged_is_one_sentence(notebook):
    assert notebook.raises("%ranks debug 0").rendered == (
        "PoolError: rank 0 did not raise in a function of yours; ranks 1 and 3 did"
    )
    assert "rank -1 did not raise" in notebook.raises("%ranks debug -1").rendered
    notebook.raises("kit.run(lambda rank: None, world_size=2)")  # never starts, so it is no run
    assert "> Cell" in notebook.run("%ranks debug 1 q").stdout
    notebook.raises("%%ranks -n 2\nheld = rank + 1\nheld / 0")
    assert notebook.run("%ranks debug 1 locals").stdout.splitlines()[2:] == [
        "rank = 1",
        "world_size = 2",
        "held = 2",
    ]
    notebook.raises("kit.run(lambda rank, world_size: open(os.devnull), world_size=2)")
    assert notebook.raises("%ranks debug").rendered == (
        "PoolError: %ranks debug shows ranks that raised in a function of yours on this host, and "
        "none did: the last run that failed ended with a RankError"
    )
    assert notebook.raises("%ranks debug 1").rendered == (
        "PoolError: rank 1 did not raise in a function of yours"
    )


def test_the_guide_shows_a_session_as_it_is(notebook):
    page = (ROOT / "docs/guide/errors.md").read_text("utf-8").split("## Look at the variables")[1]
    code, shown = re.search(r"```python\n(.*?)```.*?```\n(%.*?)```", page, re.DOTALL).groups()
    notebook.raises(code)
    magic, *lines = shown.splitlines()
    cell = notebook.send(magic)
    for line in lines:
        if line.startswith("(rank 1) "):
            assert cell.asked() == "(rank 1) "
            notebook.client.input(line.removeprefix("(rank 1) "))
    cell.finish()
    answers = [line for line in lines if not line.startswith("(rank 1) ")]
    assert re.sub(r"In\[\d+\]", "In[3]", cell.stdout).splitlines() == answers
