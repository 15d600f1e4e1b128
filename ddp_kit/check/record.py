"""Records to beat: an answer has a score, which is the lower the better, and a picture.

Each of three goals that is reached is a part of the task. The best known answer is the solution,
which is scored in the same way, so a learner can beat it.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ddp_kit.check.compared import defined
from ddp_kit.check.grader import Credit, Exercise, Grader, register
from ddp_kit.check.hints import PLACE, Steps, solutions
from ddp_kit.errors import ExerciseError
from ddp_kit.trace import Trace
from ddp_kit.trace.events import Message
from ddp_kit.trace.schedule import START, schedule

ROUNDING = 1 + 1e-9


class Span(NamedTuple):
    """What a rank does, `label`, from `start` to `end`: a box in the picture."""

    rank: int
    start: float
    end: float
    label: str


class Score(NamedTuple):
    """What an answer reached, and the spans of the picture of it."""

    value: float
    spans: list[Span]


@dataclass(frozen=True, eq=False)
class Record(Exercise):
    """A task whose answers have a score.

    unit: of the score, "rounds". goals: three scores, the easiest first. along: what the picture's
    axis shows, "seconds". rows: names of the picture's rows, if they are no ranks. grade: scores an
    answer, or fails with what is wrong with it.
    """

    unit: str = ""
    goals: tuple[float, float, float] = (0, 0, 0)
    along: str = ""
    rows: Sequence[str] = ()

    @property
    def parts(self) -> list[str]:
        return [f"at most {goal:,.6g} {self.unit}" for goal in self.goals]

    def check(self, answer: Callable[..., Any], step: int | None) -> Credit:
        """Score an answer, and raise if it is wrong or reaches no goal. step: of the hint."""
        steps = Steps(self.number, step)
        score = self._score(answer, steps)
        steps.passed()
        best, credit = _best(self), self._credit(score)
        stars = "".join("★" if reached else "☆" for reached in credit.parts.values())
        known = f"the best known answer has {best.value:,.6g}"
        if score.value * ROUNDING < best.value:
            known = f"that beats the best known answer, which has {best.value:,.6g}"
        print(f"Exercise {self.number}: {stars} {score.value:,.6g} {self.unit}; {known}.")
        credit.picture = self._picture(score, best)
        return credit

    def credit(self, answer: Callable[..., Any], seconds: float) -> Credit:
        """Return which goals an answer reaches. seconds: for all its runs together."""
        steps = Steps(self.number, PLACE, is_last=True)
        try:
            return self._credit(self._score(answer, steps, time.monotonic() + seconds))
        except (ExerciseError, NotImplementedError) as error:
            return Credit(dict.fromkeys(self.parts, False), {"": str(error)})

    def _credit(self, score: Score) -> Credit:
        reached = (score.value <= ROUNDING * goal for goal in self.goals)
        return Credit(dict(zip(self.parts, reached, strict=True)))

    def _score(self, answer: Callable[..., Any], steps: Steps, end: float | None = None) -> Score:
        grader = Grader(self, answer, steps, end=end)
        score = self.grade(grader)
        easiest = self.goals[0]
        if score.value > ROUNDING * easiest:
            few = f"right, but {score.value:,.6g} {self.unit} where at most {easiest:,.6g}"
            grader.fail(f"{few} are the first goal", hint="no goal")
        return score

    def _picture(self, score: Score, best: Score) -> Any:
        from ddp_kit.plot.work import schedules  # ranks load no matplotlib

        drawn = {"your answer": score, "the best known": best}
        titles = {f"{name}: {each.value:,.6g} {self.unit}": each for name, each in drawn.items()}
        title = f"Exercise {self.number}, {self.form}"
        spans = {name: each.spans for name, each in titles.items()}
        return schedules(spans, title, self.along, self.rows)


def record(
    number: str,
    form: str,
    unit: str,
    goals: tuple[float, float, float],
    along: str = "round",
    rows: Sequence[str] = (),
) -> Callable[[Callable[[Grader], Score]], Callable[[Grader], Score]]:
    """Register how an answer is scored, as `kit.check.exercise_2_9`. For the others, see Record.

    Ranks may call no collectives, which hide what is sent.
    """

    def add(grade: Callable[[Grader], Score]) -> Callable[[Grader], Score]:
        known = (number, "record", form, "", grade, (), (), (), {}, False)
        about = f"Score `{form}` in {unit}: fewer are better."
        register(Record(*known, unit, goals, along, rows), about)
        return grade

    return add


@cache
def _best(task: Record) -> Score:
    answer = defined(task.number, solutions()[task.number]["program"], task.form.partition("(")[0])
    with redirect_stdout(io.StringIO()):
        return task.grade(Grader(task, answer, Steps(task.number, PLACE)))


def rounds(trace: Trace) -> Score:
    """Score a run by its rounds, in each of which a rank sends or receives one message."""
    return on_a_wire(trace, 1, 0, both_ways=False)


def on_a_wire(trace: Trace, alpha: float, beta: float, both_ways: bool = True) -> Score:
    """Score a run by its seconds, if each message takes alpha + beta seconds for each byte.

    A rank can send one message and receive another one at the same time, unless both_ways is False.
    A message begins when its send and its receive have been posted, and nothing else takes time.
    """
    sent = [message for message in trace.messages() if message.recv is not None]
    ends_of = [(message.send, message.recv) for message in sent]
    number = {(e.rank, e.index): each for each, pair in enumerate(ends_of) for e in pair}
    queues = [list(actions) for actions in schedule(trace).actions]
    now, out, into = ([0.0] * trace.world_size for _ in range(3))  # by rank, until when it is busy
    into = into if both_ways else out
    posted: list[dict[str, float]] = [{} for _ in sent]  # when, by kind
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}

    def advance(rank: int) -> None:
        queue = queues[rank]
        while queue:
            event, what = queue[0].event, queue[0].what
            each = number.get((rank, event.index))
            if each is not None:
                posted[each].setdefault(event.kind, now[rank])
                if what != START and each not in ended:
                    return
                now[rank] = now[rank] if what == START else max(now[rank], ended[each])
            queue.pop(0)

    def earliest(each: int) -> tuple[float, int, int]:
        message = sent[each]
        start = max(*posted[each].values(), out[message.src], into[message.dst])
        return start, message.src, message.send.index

    while True:
        for rank in range(trace.world_size):
            advance(rank)
        ready = [each for each in range(len(sent)) if each not in ended and len(posted[each]) == 2]
        if ready:
            each = min(ready, key=earliest)
            message, begun[each] = sent[each], earliest(each)[0]
            ended[each] = begun[each] + alpha + beta * message.nbytes
            out[message.src] = into[message.dst] = ended[each]
        elif left := [rank for rank, queue in enumerate(queues) if queue]:
            queues[min(left, key=lambda rank: now[rank])].pop(0)  # a send that was buffered
        else:
            return Score(max(ended.values(), default=0), _spans(sent, begun, ended))


def _spans(sent: list[Message], begun: dict[int, float], ended: dict[int, float]) -> list[Span]:
    """Return what each rank does when; what it sends and receives at one time is one span."""
    labels: dict[tuple[int, float, float], list[str]] = {}
    for each, message in enumerate(sent):
        time = begun[each], ended[each]
        labels.setdefault((message.src, *time), []).insert(0, f"to {message.dst}")
        labels.setdefault((message.dst, *time), []).append(f"from {message.src}")
    return [Span(*key, ", ".join(labels[key])) for key in sorted(labels)]
