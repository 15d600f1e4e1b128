"""What the kit says of a run that cannot end, or whose ranks disagree: from plain data only."""

from ddp_kit.verdict.agreement import plainly_agree
from ddp_kit.verdict.deadlocks import deadlock
from ddp_kit.verdict.graph import shortest_cycle, stuck
from ddp_kit.verdict.mismatches import mismatch
from ddp_kit.verdict.state import Channel, RankState

__all__ = [
    "Channel",
    "RankState",
    "deadlock",
    "mismatch",
    "plainly_agree",
    "shortest_cycle",
    "stuck",
]
