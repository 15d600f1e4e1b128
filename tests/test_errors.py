"""What errors say, without any process."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

import ddp_kit as kit
from ddp_kit.error_text import Call, Frame, TextFormatter, Wait, name_ranks


def failure(rank, message="boom", line=3, own=True):
    frames = (
        Frame("cell-file", line, "worker", f"raise ValueError({message!r})", own),
        Frame("library.py", 99, "inner", "fail()", False),
    )
    return kit.RankFailure(rank, "ValueError", message, frames)


def test_ranks_are_named_as_in_a_sentence():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([1, 0]) == "ranks 0 and 1"
    assert name_ranks([3, 0, 1]) == "ranks 0, 1 and 3"


def test_equal_failures_are_merged_and_others_are_not():
    error = kit.RankError({2: failure(2, line=4), 1: failure(1), 0: failure(0)})
    assert list(error.failures) == [0, 1, 2]
    assert str(error) == (
        "ranks 0 and 1 raised ValueError: boom\n    line 3 of worker: raise ValueError('boom')\n"
        "rank 2 raised ValueError: boom\n    line 4 of worker: raise ValueError('boom')"
    )


def test_failures_that_differ_in_an_address_are_reported_for_each_rank():
    failures = [failure(rank, f"bad op: <object at 0x7f{rank}a>") for rank in range(3)]
    error = kit.RankError(dict(enumerate(failures)))
    assert str(error).startswith("ranks 0, 1 and 2 raised ValueError: bad op: <object at 0x7f0a>")
    error = kit.RankError({rank: failure(rank, f"bad flag 0x{rank}") for rank in range(2)})
    assert "rank 1 raised ValueError: bad flag 0x1" in str(error)


def test_failures_that_differ_in_their_own_rank_where_ddp_names_it_are_merged():
    failures = [failure(n, f"for rank {n}: device_ids [{n}], output_device {n}") for n in range(2)]
    error = kit.RankError(dict(enumerate(failures)))
    assert str(error).startswith(
        "ranks 0 and 1 raised ValueError: for this rank: device_ids [rank], output_device rank\n"
    )
    assert error.failures[1].message == "for rank 1: device_ids [1], output_device 1"
    error = kit.RankError({rank: failure(rank, "no file for rank 0") for rank in range(2)})
    assert str(error).startswith("ranks 0 and 1 raised ValueError: no file for rank 0\n")
    for numbers in ((1, 0), (1, 10)):  # of another rank
        failures = [failure(rank, f"for rank {n}") for rank, n in enumerate(numbers)]
        assert "rank 1 raised" in str(kit.RankError(dict(enumerate(failures))))
    assert "for rank 1" in str(kit.RankError({1: failure(1, "for rank 1")}))


def test_the_message_holds_no_file_and_the_traceback_names_the_cell():
    error = kit.RankError({0: failure(0)}, cell_names={"cell-file": "Cell In[7]"})
    assert "cell-file" not in str(error)
    assert error._render_traceback_() == [
        "RankError:",
        "rank 0 raised ValueError: boom",
        "  Cell In[7], line 3, in worker",
        "    raise ValueError('boom')",
        "",
    ]


def test_a_deep_recursion_takes_a_few_lines():
    frame = Frame("cell-file", 2, "deeper", "return deeper(n)", True)
    error = kit.RankError({0: kit.RankFailure(0, "RecursionError", "too deep", (frame,) * 1000)})
    assert error._render_traceback_()[1:] == [
        "rank 0 raised RecursionError: too deep",
        "  cell-file, line 2, in deeper",
        "    return deeper(n)",
        "    ... repeated 999 more times",
        "",
    ]


def test_a_failure_outside_the_learners_code_shows_no_line():
    error = kit.RankError({0: failure(0, own=False)})
    assert str(error) == "rank 0 raised ValueError: boom"
    assert error.failures[0].where is None


@pytest.mark.parametrize(
    ("exitcode", "how", "cause"),
    [
        (-9, "ended by SIGKILL", "it was killed from outside"),
        (-11, "ended by SIGSEGV", "native code crashed"),
        (-15, "ended by SIGTERM", "this signal was sent to it, by the worker or"),
        (3, "exited with code 3", "the worker called os._exit"),
        (None, "its exit code was lost", "unknown"),
    ],
)
def test_a_death_has_its_likely_cause_and_names_the_others(exitcode, how, cause):
    error = str(kit.RankDiedError(1, exitcode, [3, 2]))
    assert error.startswith(f"rank 1 died: {how} (ranks 2 and 3 died too). Likely cause: {cause}")


RECV = Frame("cell-file", 5, "worker", "dist.recv(t, src=1)", True)


def test_equal_waits_are_merged_and_in_rank_order():
    waits = [Wait(3, "recv(src=1)", RECV), Wait(2, None), Wait(0, "recv(src=1)", RECV)]
    error = kit.RankError({1: failure(1)}, waits, {"cell-file": "Cell In[7]"})
    lines = [
        "ranks 0 and 3 were waiting in recv(src=1)",
        "    line 5 of worker: dist.recv(t, src=1)",
        "rank 2 had not returned",
    ]
    assert str(error).splitlines()[-3:] == lines
    assert error._render_traceback_()[-4:] == [
        lines[0],
        "  Cell In[7], line 5, in worker",
        "    dist.recv(t, src=1)",
        lines[2],
    ]


def test_a_timeout_names_who_had_not_returned_and_what_to_do():
    waiting = kit.RunTimeoutError(2.5, [Wait(3, "recv(src=1)", RECV), Wait(1, "send(dst=0)")])
    assert waiting.unfinished == (1, 3)
    assert str(waiting).splitlines() == [
        "the run did not end within 2.5 s.",
        "rank 1 was waiting in send(dst=0)",
        "rank 3 was waiting in recv(src=1)",
        "    line 5 of worker: dist.recv(t, src=1)",
        "Look for a message that nobody sends or nobody receives.",
    ]
    uneven = str(kit.RunTimeoutError(1, [Wait(2, "all_reduce"), Wait(1, "barrier")], {0, 3}))
    assert uneven.splitlines()[3:] == [
        "ranks 0 and 3 had returned",
        "All ranks must call the same collectives, in the same order and with equal shapes.",
    ]


@pytest.mark.parametrize(
    ("ops", "hint"),
    [
        ([None, None], "Look for a loop that does not end, or a wait that the kit does not record"),
        ([None, "barrier"], "Look for a loop that does not end on rank 0, or a wait that the kit"),
        (["recv(src=1)", "isend(dst=0)"], "Look for a message that nobody sends or nobody"),
        (["store.get('a')", "store.wait(['b'])"], "Look for a key that no rank sets."),
        (["broadcast(src=0)", "barrier"], "All ranks must call the same collectives"),
        (["store.get('a')", "barrier"], "Look for a call that one of these ranks should have made"),
        (["recv(src=1)", "barrier"], "Look for a call that one of these ranks should have made"),
    ],
)
def test_a_timeout_hints_at_what_is_known_of_the_waits(ops, hint):
    waits = [Wait(rank, op) for rank, op in enumerate(ops)]
    *_, last = str(kit.RunTimeoutError(1, waits)).splitlines()
    assert last.startswith(hint)
    assert ("raise the timeout" in last) == (None in ops)


def test_a_notebook_shows_the_sentence_only():
    assert kit.PoolError("one sentence")._render_traceback_() == ["PoolError: one sentence"]


def test_whom_a_rank_waits_for_is_named_where_that_is_known():
    waits = [
        Wait(0, "barrier", peers=(2, 3)),
        Wait(1, "barrier", peers=(2, 3)),
        Wait(2, "recv", RECV, (0, 1), nbytes=1200),
        Wait(3, "send(dst=0, tag=5)", RECV, (0,), 5, 1),
    ]
    assert TextFormatter().waits(waits) == [
        "ranks 0 and 1 were waiting for ranks 2 and 3 in barrier",
        "rank 2 was waiting for any of ranks 0 and 1 in recv, 1,200 bytes",
        "rank 3 was waiting for rank 0 in send(dst=0, tag=5), 1 byte",
        "    line 5 of worker: dist.recv(t, src=1)",
    ]


DEADLOCK = kit.DeadlockError(
    "rank 0 waits for a message from rank 1, which has returned",
    [Wait(2, "barrier", peers=(0,)), Wait(0, "recv(src=1)", RECV, (1,), nbytes=400)],
    "Count the messages.",
    [3, 1],
)
MISMATCH = kit.MismatchError(
    "rank 0 calls barrier, rank 1 calls all_reduce",
    [Call(1, "all_reduce"), Call(0, "barrier", RECV)],
    "Call the same.",
    {1: failure(1)},
)
DEADLOCK.cell_names = MISMATCH.cell_names = {"cell-file": "Cell In[7]"}


def test_a_deadlock_is_a_fact_the_waits_and_a_hint():
    assert DEADLOCK.returned == (1, 3)
    assert [wait.rank for wait in DEADLOCK.waits] == [0, 2]
    assert str(DEADLOCK).splitlines() == [
        "rank 0 waits for a message from rank 1, which has returned.",
        "rank 0 was waiting for rank 1 in recv(src=1), 400 bytes",
        "    line 5 of worker: dist.recv(t, src=1)",
        "rank 2 was waiting for rank 0 in barrier",
        "ranks 1 and 3 had returned",
        "Count the messages.",
    ]
    assert DEADLOCK._render_traceback_()[:4] == [
        "DeadlockError: rank 0 waits for a message from rank 1, which has returned.",
        "rank 0 was waiting for rank 1 in recv(src=1), 400 bytes",
        "  Cell In[7], line 5, in worker",
        "    dist.recv(t, src=1)",
    ]


def test_a_mismatch_is_a_fact_the_calls_what_came_of_them_and_a_hint():
    assert str(MISMATCH).splitlines() == [
        "rank 0 calls barrier, rank 1 calls all_reduce.",
        "rank 0 called barrier",
        "    line 5 of worker: dist.recv(t, src=1)",
        "rank 1 called all_reduce",
        "rank 1 raised ValueError: boom",
        "    line 3 of worker: raise ValueError('boom')",
        "Call the same.",
    ]
    assert MISMATCH._render_traceback_()[2:4] == [
        "  Cell In[7], line 5, in worker",
        "    dist.recv(t, src=1)",
    ]


def test_a_bug_of_the_kit_is_told_from_one_of_the_learner():
    error = kit.InternalError(2, "Traceback (most recent call last):\n  ...\nKeyError: 3\n")
    assert (error.rank, error.waits, error.trace) == (2, (), None)
    assert isinstance(error, RuntimeError)
    lines = [
        "ddp_kit itself failed on rank 2: this is a bug in ddp_kit.",
        "Please report it to the authors of ddp_kit, with your code and this traceback:",
        "Traceback (most recent call last):",
        "  ...",
        "KeyError: 3",
    ]
    assert str(error).splitlines() == lines
    assert error._render_traceback_() == [f"InternalError: {lines[0]}", *lines[1:]]


@pytest.mark.parametrize(
    "error",
    [
        DEADLOCK,
        MISMATCH,
        kit.RankError({0: failure(0)}, [Wait(1, "barrier")], {"cell-file": "Cell In[7]"}),
        kit.RankDiedError(1, -9, [2], [Wait(0, "barrier")], {3: failure(3)}),
        kit.RunTimeoutError(2.5, [Wait(0, "barrier")], [1]),
        kit.InternalError(1, "Traceback:\n  a line\nKeyError: 3\n"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_is_whole_after_it_was_sent(error, again):
    assert error.trace is None
    error = copy.copy(error)
    error.trace = ["what was communicated"]
    if isinstance(error, kit.MismatchError):
        error.result, error.failures = "what came back", {0: failure(0)}
    other = again(error)
    assert type(other) is type(error)
    assert vars(other) == vars(error)
    assert other._render_traceback_() == error._render_traceback_()
    assert str(other) == str(error)


def raised(kind, message, line=3, **more):
    return kit.RankFailure(0, kind, message, failure(0, message, line).frames, **more)


def test_the_cause_the_context_the_notes_and_the_members_of_an_error_are_shown():
    lookup = raised("KeyError", "'lr'", 4)
    caused = raised("ValueError", "no rate", notes=("Set lr.", "See line 1."), cause=lookup)
    group = raised("ExceptionGroup", "two (2 sub-exceptions)", members=(caused, lookup))
    error = kit.RankError({0: raised("TypeError", "bad", 9, context=group)})
    key_error = "    line 4 of worker: raise ValueError(\"'lr'\")"
    assert str(error).splitlines() == [
        "rank 0 raised TypeError: bad",
        "    line 9 of worker: raise ValueError('bad')",
        "raised during handling of ExceptionGroup: two (2 sub-exceptions)",
        "    line 3 of worker: raise ValueError('two (2 sub-exceptions)')",
        "  1. ValueError: no rate",
        "  Set lr.",
        "  See line 1.",
        "      line 3 of worker: raise ValueError('no rate')",
        "  directly caused by KeyError: 'lr'",
        "  " + key_error,
        "  2. KeyError: 'lr'",
        "  " + key_error,
    ]
    assert pickle.loads(pickle.dumps(error)).failures == error.failures


def test_failures_with_different_causes_are_kept_apart():
    alike = [raised("ValueError", "bad", cause=raised("KeyError", key)) for key in "aab"]
    failures = {rank: replace(one, rank=rank) for rank, one in enumerate(alike)}
    lines = [line for line in str(kit.RankError(failures)).splitlines() if line[0] != " "]
    assert lines == [
        "ranks 0 and 1 raised ValueError: bad",
        "directly caused by KeyError: a",
        "rank 2 raised ValueError: bad",
        "directly caused by KeyError: b",
    ]


@pytest.mark.parametrize("error", [DEADLOCK, MISMATCH], ids=lambda error: type(error).__name__)
def test_an_exception_that_a_waiting_rank_handles_is_shown(error):
    error = copy.copy(error)
    error.handled = {0: failure(0), 2: failure(2)}
    lines = str(error).splitlines()
    at = lines.index("ranks 0 and 2 were handling ValueError: boom")
    assert lines[at + 1] == "    line 3 of worker: raise ValueError('boom')"
    error.handled = {0: failure(0)}
    assert "\nrank 0 was handling ValueError: boom\n" in str(error)
    assert "handling" not in str(DEADLOCK) + str(MISMATCH)


def test_what_a_library_handles_by_itself_is_not_shown_and_keeps_no_failures_apart():
    alike = [raised("ValueError", "bad", context=failure(0, n, own=False)) for n in "ab"]
    failures = {rank: replace(one, rank=rank) for rank, one in enumerate(alike)}
    assert str(kit.RankError(failures)).splitlines() == [
        "ranks 0 and 1 raised ValueError: bad",
        "    line 3 of worker: raise ValueError('bad')",
    ]
