"""What a tool said about a program, and whether that is right."""

from __future__ import annotations

from dataclasses import dataclass, field

from suite import DEADLOCK, MISMATCH, NONE, RAISED, UNAWAITED, Program

OTHER = "other"  # an error that names no cause, such as a connection that a peer has closed
SILENT = "silent"  # the program did not end, and the tool said nothing until it was stopped


@dataclass
class Report:
    """What a tool said of one program.

    kind: DEADLOCK, MISMATCH, RAISED, UNAWAITED, NONE, OTHER or SILENT. ranks: those whose calls it
    shows, each with the lines that it shows; absent: those for which it says others wait. noise:
    its further messages. seconds: until it answered.
    """

    kind: str
    ranks: dict[int, list[int]] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    noise: int = 0
    seconds: float = 0.0
    text: str = ""

    def __post_init__(self) -> None:
        self.ranks = {int(rank): lines for rank, lines in self.ranks.items()}  # JSON has str

    @property
    def complains(self) -> bool:
        """Whether it says that something is wrong with the program."""
        return self.kind in (DEADLOCK, MISMATCH, RAISED, UNAWAITED, OTHER)


@dataclass(frozen=True)
class Judgement:
    """How a report compares with what the program says of itself."""

    outcome: str  # TP, FN, FP or TN
    kind: bool = False
    ranks: bool = False
    lines: bool = False


def judge(program: Program, report: Report) -> Judgement:
    """Return whether a report is right. README.md defines the measures."""
    if program.is_right:
        # A right program that did not end under a tool is broken by it.
        return Judgement("TN" if report.kind == NONE else "FP")
    if not report.complains:
        return Judgement("FN")
    marks = program.marks
    fault, held_up, absent = marks["fault"], marks["held up"], marks["absent"]
    shown = set(report.ranks)
    ranks = (
        fault.keys() <= shown <= fault.keys() | held_up.keys()
        and absent.keys() <= set(report.absent) | shown - fault.keys()
    )
    lines = all(
        set(report.ranks.get(rank, ())) & fault[rank]
        and set(report.ranks.get(rank, ())) <= fault[rank] | held_up.get(rank, set())
        for rank in fault
    )
    return Judgement("TP", report.kind == program.expected, ranks, lines)
