"""What all graders have in common: what they accept, show and pass on."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, error_text, solved

import ddp_kit as kit
from ddp_kit.check.grader import format_value
from ddp_kit.check.hints import find

move = solved("2.1")


@pytest.mark.parametrize(
    ("answer", "got"), [(None, "None"), (torch.zeros(1), "a value of type Tensor")]
)
def test_what_is_no_function_is_refused_in_a_sentence(answer, got):
    assert error_text(kit.check.exercise_2_1, answer) == (
        "exercise 2.1: kit.check.exercise_2_1(broadcast) "
        f"expects your function or class itself; got {got}"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kit.check.exercise_2_1(),
            "exercise_2_1 is missing a required argument: 'answer'; "
            "write kit.check.exercise_2_1(broadcast)",
        ),
        (
            lambda: kit.check.exercise_2_1(move, hints=2),
            "exercise_2_1 has no argument hints=; did you mean hint=?",
        ),
        (
            lambda: kit.check.exercise_0_z(move),
            "kit.check has no exercise_0_z; similar names: exercise_0_a, exercise_0_b, ",
        ),
    ],
)
def test_a_wrong_call_is_explained_in_a_sentence(call, message):
    with pytest.raises((kit.ExerciseError, AttributeError)) as caught:
        call()
    assert message in str(caught.value)
    assert len(caught.value._render_traceback_()) == 1


def test_a_check_loads_the_graders_of_its_lesson_alone():
    program = (
        "import sys, ddp_kit as kit; kit.check.exercise_0_a; kit.check.exercise_10_7; "
        "print('ddp_kit.check.zero' in sys.modules, 'ddp_kit.check.backends' in sys.modules); "
        "print(kit.check.project_1, len(kit.check.__all__) > 200)"
    )
    out = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert out[0] == "False True"
    assert out[1].startswith("<function project_1")
    assert out[1].endswith("True")


def test_other_arguments_are_refused_in_a_sentence():
    def broadcast(tensor):
        pass

    assert error_text(kit.check.exercise_2_1, broadcast) == (
        "exercise 2.1: your answer must accept the call broadcast(tensor, src), "
        "but it is defined as broadcast(tensor)"
    )


def test_a_stub_fails_with_its_own_error_and_shows_nothing_of_the_kit(capsys):
    def broadcast(tensor, src):
        raise NotImplementedError("Exercise 2.1: send")

    with pytest.raises(NotImplementedError) as caught:
        kit.check.exercise_2_1(broadcast)
    assert type(caught.value) is NotImplementedError
    assert str(caught.value) == "Exercise 2.1: send"
    assert caught.value.__suppress_context__
    assert caught.value._render_traceback_() == ["NotImplementedError: Exercise 2.1: send"]
    assert capsys.readouterr().out == ""


def test_pytorchs_own_not_implemented_error_is_reported_with_its_line():
    def broadcast(tensor, src):
        torch.empty(1, device="meta").cpu()

    text = error_text(kit.check.exercise_2_1, broadcast)
    # On a busy machine, the run may be over before the other rank has raised its own.
    assert re.search(r"it raised an error\nranks? [01].* raised NotImplementedError", text)
    assert ' of broadcast: torch.empty(1, device="meta").cpu()' in text


def test_an_answer_that_cannot_be_sent_to_the_ranks_is_a_pool_error():
    unsendable = (number for number in range(3))

    def broadcast(tensor, src):
        next(unsendable)

    with pytest.raises(kit.PoolError, match="cannot be sent to the ranks"):
        kit.check.exercise_2_1(broadcast)


def test_prints_of_a_wrong_answer_are_shown_for_the_run_that_failed_only(capsys):
    def broadcast(tensor, src):
        print("src is", src)
        if src == 0:
            move(tensor, 0)

    error_text(kit.check.exercise_2_1, broadcast)
    assert capsys.readouterr().out == "[rank 0] src is 1\n[rank 1] src is 1\n"


def test_prints_of_a_right_answer_are_shown_once(capsys):
    def broadcast(tensor, src):
        print("src is", src)
        move(tensor, src)

    kit.check.exercise_2_1(broadcast)
    assert capsys.readouterr().out == (
        "[rank 0] src is 0\n[rank 1] src is 0\n"
        "Exercise 2.1: right on 1, 2, 3, 4 and 5 ranks, from every src.\n"
    )


def test_an_error_shows_the_learners_line_and_nothing_of_the_grader():
    def all_gather(pieces, tensor):
        dist.barrier()
        pieces[7].copy_(tensor)

    with pytest.raises(kit.ExerciseError) as caught:
        kit.check.exercise_2_3(all_gather, hint=1)
    error = caught.value
    line = all_gather.__code__.co_firstlineno + 2
    assert str(error) == (
        "exercise 2.3, all_gather(pieces, tensor) on 2 ranks: it raised an error\n"
        "ranks 0 and 1 raised IndexError: list index out of range\n"
        f"    line {line} of all_gather: pieces[7].copy_(tensor)\n"
        "Check again for a hint, or pass hint=2."
    )
    shown = "\n".join(error._render_traceback_())
    assert shown.startswith("ExerciseError: exercise 2.3, all_gather(pieces, tensor) on 2 ranks")
    assert "RankError:" in shown
    assert "in all_gather" in shown
    assert "_all_gather" not in shown
    assert kit.plot.timeline(error).text_table  # the error has the trace
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_result_that_the_check_cannot_use_is_shown_with_the_line_that_uses_it():
    def route(scores, bias, k):
        weights, choice = (scores + bias).topk(k)
        return weights.tolist(), choice.tolist()

    with pytest.raises(kit.ExerciseError) as caught:
        kit.check.exercise_19_a(route)
    assert str(caught.value) == (
        "exercise 19.a, route(scores, bias, k): it raised an error where the check uses it: "
        "choice, order = choice.sort(-1)\n"
        "rank 0 raised TypeError: sort() takes no positional arguments\n"
        "Check again for a hint, or pass hint=2."
    )


def test_an_answer_that_calls_a_function_without_its_lines_is_told_so():
    def average_gradients(model):
        raise NotImplementedError("Exercise 3.b: replace parameter.grad by the mean")

    assert_mistake(kit.check.exercise_3_d, average_gradients, "another gap")


def test_a_missing_attribute_is_no_known_mistake_with_another_one():
    def add_up(rank, world_size, numbers):
        return torch.tensor([numbers[rank]]).all_reduce()

    assert_mistake(kit.check.exercise_0_b, add_up, "")


def test_a_tensor_in_the_place_of_a_number_is_called_a_tensor():
    assert format_value(torch.tensor([9]), against=9) == "a tensor of [9]"
    assert format_value(torch.tensor(9), against=9) == "a tensor of 9"
    assert format_value(torch.tensor(9)) == "9"


def test_a_long_tensor_is_shown_with_the_first_place_where_it_differs():
    want, have = torch.arange(60.0), torch.arange(60.0)
    have[17] = -1
    assert format_value(have, against=want) == (
        "[0, 1, 2, 3, 4, 5, 6, 7, ...], where number 17 is -1 instead of 17"
    )


def test_another_shape_or_dtype_is_named():
    assert format_value(torch.zeros(2), against=torch.zeros(2, dtype=torch.int64)) == (
        "[0, 0] (float32 of shape (2,) instead of int64 of shape (2,))"
    )


def ask(answer, number="2_1", **asked) -> list[str]:
    """Return the lines of a wrong answer's error after those that say what is wrong."""
    with pytest.raises(kit.ExerciseError) as caught:
        getattr(kit.check, f"exercise_{number}")(answer, **asked)
    assert str(caught.value).endswith(caught.value.hint)
    return caught.value.hint.splitlines()


def into_a_copy(tensor, src):
    move(tensor.clone(), src)


def test_each_check_that_fails_says_one_more_until_one_passes():
    found = find("2.1", "unchanged")
    first = ["Check again for a hint, or pass hint=2."]
    second = [found.question, "Check again for a hint, or pass hint=3."]
    third = [found.question, found.place, "Pass hint=4 for a solution."]
    kit.check.exercise_2_1(move)
    assert [ask(into_a_copy) for _ in range(4)] == [first, second, third, third]
    kit.check.exercise_2_1(move)
    assert ask(into_a_copy) == first


def test_each_mistake_begins_with_what_is_wrong():
    kit.check.exercise_2_1(move)
    assert len(ask(into_a_copy)) == 1
    assert len(ask(lambda tensor, src: 1 / 0)) == 1
    assert len(ask(lambda tensor, src: move(tensor, 0))) == 1
    assert len(ask(into_a_copy)) == 2


def test_a_learner_can_ask_for_a_step_and_gets_a_solution_only_on_request():
    found = find("2.1", "unchanged")
    assert ask(into_a_copy, hint=1) == ["Check again for a hint, or pass hint=2."]
    said = ask(into_a_copy, hint=4)
    assert said[:3] == [found.question, found.place, "A solution:"]
    assert "    dist.recv(tensor, src)" in said[3:]
    assert error_text(kit.check.exercise_2_1, into_a_copy, hint=5).startswith(
        "hint must be 1, 2, 3 or 4, got 5"
    )


def test_a_teacher_sets_how_far_the_hints_go(monkeypatch, capsys):
    monkeypatch.setenv("DDP_KIT_HINTS", "2")
    found = find("2.1", "unchanged")
    assert ask(into_a_copy, hint=4) == [found.question]
    kit.check.credit(kit.check.exercise_2_1, into_a_copy)
    assert found.question in (text := capsys.readouterr().out)
    assert found.place not in text
    monkeypatch.setenv("DDP_KIT_HINTS", "all")
    assert error_text(kit.check.exercise_2_1, into_a_copy) == (
        "DDP_KIT_HINTS must be 1, 2, 3 or 4, got 'all'"
    )


def test_numbers_that_were_never_written_are_not_right_by_luck():
    def running_sum(tensor):
        move(arriving := torch.empty_like(tensor), 1)
        tensor.copy_(arriving)

    assert "rank 0 should hold [10, 11, 12] but holds [nan, nan, nan]" in error_text(
        kit.check.exercise_1_3, running_sum
    )
    assert not any(kit.run(lambda rank, n: torch.are_deterministic_algorithms_enabled()))
