"""Decides, from plain data only, whether a run can never end or its ranks disagree, and why.

judge.py decides which Verdict a run gets, from which the run makes its error. graph.py finds ranks
that can never continue, as where tags differ, and explanation.py says why; mismatches.py compares
what the ranks called.
"""

from ddp_kit.verdict.explanation import Verdict
from ddp_kit.verdict.graph import Channel, RankState, shortest_cycle, stuck
from ddp_kit.verdict.judge import deadlock, ends_by_its_limit, judge
from ddp_kit.verdict.mismatches import mismatch

__all__ = [
    "Channel",
    "RankState",
    "Verdict",
    "deadlock",
    "ends_by_its_limit",
    "judge",
    "mismatch",
    "shortest_cycle",
    "stuck",
]
