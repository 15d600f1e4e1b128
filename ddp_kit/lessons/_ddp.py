"""The pictures of the lesson on DDP, and its proof."""

from __future__ import annotations

from collections import Counter

from torch import nn

from ddp_kit import compare
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.trace import Trace


def count_calls(trace: Trace) -> Counter[str]:
    """Count the collectives of a trace by call, such as "DDP broadcast(src=0)"."""
    return Counter(next(iter(call.values())).call for call in trace.collectives)


def on_one_axis(*results) -> list:
    """Draw the buckets of a typical backward of rank 0 from each run of `backwards`.

    The pictures have the same time axis, which starts when backward begins.
    """
    from ddp_kit import plot  # ranks do not need it

    pictures = []
    for result in results:
        step = typical(result.trace)
        pictures.append(plot.buckets(result, step=step, began=result[0][step]))
    charts = [picture.axes[1] for picture in pictures]  # axes[0] is the sheet of paper
    longest = max(chart.get_xlim()[1] for chart in charts)
    for chart in charts:
        chart.set_xlim(0, longest)
    return pictures


def typical(trace: Trace) -> int:
    """Return the index of the backward with rank 0's median wait; the first does not count."""
    reduced = [event for event in trace if event.rank == 0 and event.op == "DDP all_reduce"]
    waits = [event.end - event.waited for event in reduced if event.end and event.waited][1:]
    return 1 + waits.index(sorted(waits)[len(waits) // 2])


@lesson_main("ddp")
def main(ranks: Ranks) -> str:
    """Run the workers, compare with what one process computes, and print one line."""
    hands = [dealt for (dealt,) in ranks(lesson.deal, 10, False, False)]
    prove("positions are dealt as by hand", hands == lesson.deal_by_hand(10, ranks.world_size))
    rows = 4 * ranks.world_size
    alone = lesson.train_tied(0, 1, lambda module: module, rows)
    by_hand = lesson.DistributedDataParallel, lesson.BucketedDistributedDataParallel
    for wrap in (*by_hand, nn.parallel.DistributedDataParallel):
        result = ranks(lesson.train_tied, wrap, rows)
        prove(f"{wrap.__name__} trains as one process does", compare(result, alone))
    whole = lesson.whole_batch_gradient(8 * 4 * ranks.world_size)
    for silent, exchanges in ((True, 1), (False, 4)):
        result = ranks(lesson.accumulate, 4, silent)
        prove("accumulated gradients are those of one large batch", compare(result, whole))
        count = count_calls(result.trace)["DDP all_reduce"]
        prove(f"{exchanges} of 4 backwards exchanged gradients", count == exchanges)
    return "equal start, mean gradients; no_sync and sampler as by hand"


from ddp_kit.lessons import ddp as lesson
