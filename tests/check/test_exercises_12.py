"""Exercises of lesson 12: what learners get wrong, and what the graders say then."""

from __future__ import annotations

import math

import pytest
from answers import error_text

import ddp_kit as kit

IT = "on 1 rank: it should return"

pytestmark = pytest.mark.usefixtures("forked_ranks")


def costs(
    rounds=2, chunk=True, levels=2, halves=True, surplus=True, core=True, swapped=False, beta=True
):
    """Return an answer to 12.1; each argument can make it wrong in one way."""

    def answer(n, nbytes, alpha, beta_):
        beta_ = beta_ if beta or not alpha else 0
        below = 2 ** (n.bit_length() - 1) if core else n
        ring = rounds * (n - 1) * (alpha + (nbytes / n if chunk else nbytes) * beta_)
        steps = math.log2(below)
        halving = levels * steps * alpha
        halving += 2 * ((below - 1) / below if halves else steps) * nbytes * beta_
        if below < n and surplus:
            halving += 2 * (alpha + nbytes * beta_)
        return (halving, ring) if swapped else (ring, halving)

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"rounds": 1},
            f"two_costs(8, 4000, 1, 0) {IT} 14 for the seconds of the ring but returns 7\n"
            "A ring goes round twice",
        ),
        (
            {"chunk": False},
            f"two_costs(8, 4000, 0, 1) {IT} 7,000 for the seconds of the ring but returns "
            "56,000\nEach message of the ring carries a chunk",
        ),
        (
            {"levels": 1},
            "should return 6 for the seconds of halving-doubling but returns 3\nThere are log2",
        ),
        (
            {"halves": False},
            "should return 7,000 for the seconds of halving-doubling but returns 24,000\nThe swaps",
        ),
        (
            {"surplus": False},
            f"two_costs(6, 4000, 1, 0) {IT} 6 for the seconds of halving-doubling but "
            "returns 4\nWhere core < n",
        ),
        ({"core": False}, "but returns 5.16993\nWhere core < n, the other ranks send"),
        ({"swapped": True}, "should return 14 for the seconds of the ring but returns 6\n"),
        (
            {"beta": False},
            f"two_costs(8, 4000, 2e-05, 2e-10) {IT} 0.0002814 for the",
        ),
    ],
)
def test_costs_that_are(wrong, words):
    text = error_text(kit.check.exercise_12_1, costs(**wrong))
    assert text.startswith("exercise 12.1, two_costs(")
    assert words in text


def test_costs_of_one_algorithm_only():
    text = error_text(kit.check.exercise_12_1, lambda n, nbytes, alpha, beta: 14.0)
    assert text.endswith(
        "two_costs(8, 4000, 1, 0) on 1 rank: it returns 14.0\nReturn both: `return ring, halving`."
    )


def rate(scale=lambda k: k, start=0.1, off=0, grows=False, warms=True, guard=True):
    """Return an answer to 12.2; each argument can make it wrong in one way."""

    def answer(step, batch, warmup):
        whole = 0.1 * scale(batch / 256)
        if warms and (grows or step < warmup or (not guard and step == 0)):
            return start + (whole - start) * (step + off) / warmup
        return whole

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"scale": lambda k: 1},
            f"learning_rate(5000, 8192, 1000) {IT} 3.2 but returns 0.1\nThe rule: 0.1 for",
        ),
        ({"scale": math.sqrt}, "should return 3.2 but returns 0.565685\nThe rule: 0.1 for"),
        (
            {"scale": lambda k: max(1, k)},
            f"learning_rate(5000, 64, 1000) {IT} 0.025 but returns 0.1\nThe rule",
        ),
        (
            {"start": 0},
            f"learning_rate(0, 8192, 1000) {IT} 0.1 but returns 0\nThe warm-up",
        ),
        ({"off": 1}, "should return 0.1 but returns 0.1031\nThe warm-up begins with 0.1"),
        ({"warms": False}, "should return 0.1 but returns 3.2\nThe warm-up begins with 0.1"),
        (
            {"grows": True},
            f"learning_rate(5000, 8192, 1000) {IT} 3.2 but returns 15.6\n",
        ),
        (
            {"guard": False},
            "exercise 12.2, learning_rate(0, 8192, 0) on 1 rank: it raised an error\n",
        ),
    ],
)
def test_a_rate_that_is(wrong, words):
    assert words in error_text(kit.check.exercise_12_2, rate(**wrong))


def test_a_rate_that_grows_by_a_factor_or_jumps():
    def by_a_factor(step, batch, warmup):
        return 0.1 * (batch / 256) ** (min(step, warmup) / max(1, warmup) if warmup else 1)

    text = error_text(kit.check.exercise_12_2, by_a_factor)
    assert f"learning_rate(500, 8192, 1000) {IT} 1.65 but returns 0.565685\nDuring" in text

    def early(step, batch, warmup):
        return rate()(step if step < 999 else 1000, batch, warmup)

    text = error_text(kit.check.exercise_12_2, early)
    assert f"learning_rate(999, 8192, 1000) {IT} 3.1969 but returns 3.2\nDuring" in text
    assert text.endswith("Step 1000 is the first one with the whole rate.")


def ranks(kept=(16, 4, 2, 0), whole=16, rounding=math.ceil, never=None, least=1):
    """Return an answer to 12.3; each argument can make it wrong in one way."""

    def answer(parameters, memory, stage):
        room = memory / parameters - kept[stage]
        if room <= 0:
            return never
        return max(least, rounding((whole - kept[stage]) / room))

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"rounding": math.floor},
            f"ranks_needed(6.7e+09, 3e+10, 3) {IT} 4 but returns 3\nRound up",
        ),
        ({"rounding": float}, "should return 4 but returns 3.57333\nRound up: with one rank less"),
        ({"whole": 2}, "should return 4 but returns 1\nStage 3 shards 16 of the 16 bytes"),
        (
            {"kept": (0, 0, 0, 0)},
            f"ranks_needed(6.7e+09, 3e+10, 2) {IT} 6 but returns 4\nStage 2 shards 14 of",
        ),
        (
            {"kept": (16, 0, 2, 0)},
            f"ranks_needed(6.7e+09, 3e+10, 1) {IT} 26 but returns 4\nStage 1 shards 12 of",
        ),
        (
            {"never": math.inf},
            f"ranks_needed(6.7e+09, 3e+10, 0) {IT} None but returns inf\nWhat every rank",
        ),
        (
            {"kept": (0, 4, 2, 0)},
            f"ranks_needed(6.7e+09, 3e+10, 0) {IT} None but returns 4\nWhat every rank",
        ),
        (
            {"least": 0},
            f"ranks_needed(1e+09, 8e+10, 0) {IT} 1 but returns 0\nThe whole model fits on",
        ),
    ],
)
def test_a_number_of_ranks_that_is(wrong, words):
    assert words in error_text(kit.check.exercise_12_3, ranks(**wrong))


def test_a_model_that_fits_but_is_said_not_to():
    text = error_text(kit.check.exercise_12_3, lambda parameters, memory, stage: None)
    assert text.endswith("should return 4 but returns None\nIt fits: return the number of ranks.")


def utilization(each=6, attention=True, all_gpus=True, factor=1):
    """Return an answer to 12.4; each argument can make it wrong in one way."""

    def mfu(tokens_per_second, gpus, parameters, layers, width, length, peak):
        needed = each * parameters + (12 * layers * width * length if attention else 0)
        return factor * needed * tokens_per_second / ((gpus if all_gpus else 1) * peak)

    return mfu


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"each": 2}, "should return 0.412308 but returns 0.137436\nWith sequences of length 0"),
        (
            {"attention": False},
            f"4096, 4096, 3.12e+14) {IT} 0.478384 but returns 0.412308\n",
        ),
        ({"all_gpus": False}, "\nThe tokens are those of all GPUs together, so divide by the peak"),
        ({"factor": 100}, "should return 0.412308 but returns 41.2308\nReturn a fraction, not a"),
    ],
)
def test_a_utilization_that_is(wrong, words):
    assert words in error_text(kit.check.exercise_12_4, utilization(**wrong))


def test_a_utilization_that_returns_nothing():
    def mfu(tokens_per_second, gpus, parameters, layers, width, length, peak):
        pass

    text = error_text(kit.check.exercise_12_4, mfu)
    assert "should return 0.412308 but returns None\n" in text
