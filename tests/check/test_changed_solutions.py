"""Solutions with a change are wrong answers, whose mistakes are found and explained."""

from __future__ import annotations

import pytest
from answers import assert_mistake, check_of, solved

from ddp_kit.check.hints import hints

pytestmark = pytest.mark.usefixtures("forked_ranks")

CHANGED = [name for name, hint in hints().items() if hint.replace and name[0].isdigit()]

# What the message says of the changes in the .ini files.
FACTS = {
    "1.1 wrong count": "exercise 1.1, ping_pong(counter, rounds=1) on 2 ranks: wrong result\n"
    "rank 0 should hold [2] but holds [1]\n",
    "1.1 nothing added": "rank 0 should hold [2] but holds [1]",
    "1.2 one ring hangs": "shift(tensor, distance=2) on 4 ranks: it deadlocks\n",
    "1.2 not blocking": "distance=1) on 2 ranks: right, but isend was called\n",
    # On 2 ranks both ways are one.
    "1.2 other way round": "shift(tensor, distance=1) on 3 ranks: wrong result\n"
    "rank 0 should return [30, 31, 32, 33] but returns [20, 21, 22, 23]\n",
    "1.2 overwritten": "rank 0 should hold [10, 11, 12, 13] but holds [20, 21, 22, 23]",
    "1.2 too many messages": "right, but 64 bytes were sent where 32 would be enough\n",
    "1.3 not a running sum": "running_sum(tensor) on 3 ranks: wrong result\n"
    "rank 2 should hold [60, 63, 66] but holds [50, 52, 54]\n",
    "1.3 not received": "rank 0 should hold [10, 11, 12] but holds [nan, nan, nan]\n",
    "1.3 too many messages": "on 2 ranks: right, but 24 bytes were sent where 12 would be enough\n",
    "1.6 waits for the slowest": "tag=7",
    "1.6 as they arrived": "returns [-13, -7, -3]",
    "1.6 other results": "[-7, -3, -13] but returns None",
    "1.6 not once": "those that were done are [3, 5, 5, 8]",
    "1.6 rank 0 works": "rank 0 has done tasks itself",
    "1.6 no end": "rank 1 was waiting for rank 0",
    "2.1 always rank 0": "exercise 2.1, broadcast(tensor, src=1) on 2 ranks: wrong result\n"
    "rank 0 should hold [20, 21, 22, 23, 24] but holds [10, 11, 12, 13, 14]\n",
    "2.1 received twice": "right, but 40 bytes were sent where 20 would be enough\n",
    "2.2 no partner": "tree_reduce(tensor) on 5 ranks: wrong result\n"
    "rank 0 should hold [150, 155, 160, 165, 170] but holds [100, 104,",
    "2.2 own numbers lost": "tree_reduce(tensor) on 2 ranks: wrong result\n",
    "2.2 not once": "rank 0 should hold [30, 32, 34, 36, 38] but holds [50, 53, 56, 59, 62",
    "2.3 wrong piece": "all_gather(pieces, tensor) on 2 ranks: wrong result\n"
    "rank 0 should hold [[10, 11, 12], [20, 21, 22]] but holds [[20, 21, 22], [10",
    "2.3 too many bytes": "on 2 ranks: right, but 48 bytes were sent where 24 would be enough\n",
    "2.4 wrong list": "gather(tensor, dst=0) on 2 ranks: wrong result\nrank 1 should return None",
    "2.4 too many messages": "right, but 16 bytes were sent where 8 would be enough\n",
    "2.5 leaves early": "barrier() on 2 ranks: a rank may leave too early\n"
    "rank 1 leaves without having heard of rank 0\n",
    "2.5 too many messages": "right, but 5 messages were sent where 4 would be enough\n",
    "2.10 not sorted": "of rank 0 are not in order",
    "2.10 numbers lost": "return 126 numbers",
    "2.10 overlap": "not one after the other",
    "2.10 unbalanced": "right, but a rank has 152 of 256 numbers, more than twice 64",
    "2.10 all to all ranks": "bytes were sent by rank 0 where 512 would be enough",
    "2.11 no goal": "where at most 55 are the first goal",
    "2.11 own pieces": "rank 1 should return [1, 11, 21, 31, 41, 51] but returns [10, 11",
    "2.11 other order": "should return [0, 10, 20, 30, 40, 50] but returns [50, 40, 30",
    "3.1 not weighted": "exercise 3.1, average_weighted(model, digits) with 1 and 3 digits on 2 "
    "ranks: wrong result\nrank 0 should hold [105, 106, 107, 108, 109, 110] in 0.weight.grad "
    "but holds [90, 91, 92, 93, 94, 95]\n",
    "3.1 not divided": "but holds [420, 424, 428, 432, 436, 440]\n",
    "3.1 divided twice": "but holds [52.5, 53, 53.5, 54, 54.5, 55]\n",
    "3.1 not added up": "but holds [15, 15.25, 15.5, 15.75, 16, 16.25]\n",
    "3.1 wrong weights": "but holds [45, 45.5, 46, 46.5, 47, 47.5]\n",
    "3.1 too much sent": "right, but reduce was called\n",
    "3.1 stops at frozen layer": "in 2.weight.grad but holds ",
    "3.1 frozen layer changed": "should hold None in 1.weight.grad but holds [0, 0",
    "3.1 parameters changed": "the gradients are right, but rank 0 changed 0.weight\n",
    "3.2 parameters changed": "the gradients are right, but rank 0 changed 0.weight\n",
    "3.2 too few calls": "most=10) on 2 ranks: right, but only 1 all_reduce for 3 buckets\n",
    "3.2 too much sent": "right, but all_reduce was called 6 times where 1 would be enough\n",
    "3.4 each rank alone": "k_means(points, centroids, steps) with 28 and 12 p",
    "3.4 empty cluster": "nan, nan]",
    "3.4 arguments changed": "right, but rank 0 changed its centroids",
    "3.4 too much travels": "right, but 6 collectives were called in 3 steps",
    "3.4 no points": "24, 0 and 16 points on 3 ranks: it deadlocks",
    "4.1 as in the lesson": "exercise 4.1, reduce_scatter(output, pieces of lengths [3, 3]) on 2 "
    "ranks: wrong result\nrank 0 should hold [30, 32, 34] in output but holds [36, 38, 40]\n",
    "4.1 own piece": "rank 0 should hold [30, 32, 34] in output but holds [10, 11, 12]\n",
    "4.1 pieces changed": "rank 0 should hold [[10, 11, 12], [13, 14, 15]]",
    "4.2 unmatched": "on 2 ranks: it deadlocks\n",
    "4.2 sent whole": "on 2 ranks: right, but rank 0 sent 2 messages instead of 6\n",
    "4.2 waits for all": "pipelined_ring(tensor of shape (60,), pieces=3) on 2 ranks: right, but "
    "rank 0 waited for 3 pieces before it passed on the first\n",
    "4.3 no partner": "on 6 ranks: it deadlocks",
    "4.3 slow if small": "all_reduce(tensor of 4,000 bytes, alpha=5e-05, beta=1e-09) on 4 ranks: "
    "right, but that takes 0.306 ms on this wire where 0.108 ms would be enough\n",
    "4.3 slow if large": "beta=1e-06) on 4 ranks: right, but that takes 8.1 ms on this wire",
    "4.4 no goal": "rounds where at most 6 are the first goal",
    "5.1 rank chooses gpu": "place(environ, gpus=2), 2 hosts on 4 ranks: wrong result\n"
    "rank 2 should return ('cuda:0', 'nccl') but returns ('cuda:2', 'nccl')\n",
    "5.1 alone differs": "place({}, gpus=2) on 1 rank: wrong result\n",
    "5.2 not set": "rank 0 should hold 4 in torch.get_num_threads() but holds 7\n",
    "5.2 world size divides": "share_cores(environ, cores=8), 2 hosts on 4 ranks: wrong result\n",
    "6.1 equal hosts": "exercise 6.1, place_of([(",
    "6.2 nobody waits": "rank 0 left the first barrier before rank 1 had come\n",
    "6.2 same keys": "rank 1 left the second barrier before rank 0 had come\n",
    "6.3 looks at once": "where all came on 2 ranks: wrong result\n",
    "6.3 error not caught": "where 1 rank never came on 2 ranks: it raised an error\n",
    "6.3 wrong ranks": "rank 0 should return [] but returns [0, 1]\n",
    "6.3 waits too long": " s though all ranks came",
    "6.3 not a list": "rank 0 should return [] but returns 1\n",
    "7.1 unmatched": "exercise 7.1, scatter_batch(batch, [2, 1], 3) on 2 ranks: it raised an error",
    "7.1 other order": "rank 1 should return [6, 7, 8] but returns [0, 1, 2]\n",
    "7.1 cut elsewhere": "rank 0 should return [0, 1, 2, 3, 4, 5] but returns [0, 1, 2] (",
    "7.1 not the shard": "rank 0 should return [0, 1, 2, 3, 4, 5] but returns ",
    "8.2 ranks communicate": "on 2 ranks: barrier was called\n",
    "8.2 not filled up": "range(23), seed=7) on 2 ranks: rank 1 should get 12 positions\nrank 0 g",
    "8.2 positions beyond": "seed=7) on 2 ranks: there is no position 23\nrank 0 gets",
    "8.2 positions lost": "on 2 ranks: no rank gets position ",
    "8.2 same order": "on 2 ranks: epochs 0 and 1 have the same order\n",
    "8.2 only rotated": "on 1 rank: epochs 0 and 1 have the same order, only starting at a differ",
    "8.2 process seeded": "on 2 ranks: it changed the random state of the whole process\n",
    "8.2 generator goes on": "epoch 0 has a different order the second time\n",
    "8.3 exchanged too often": "right, but DDP called all_reduce 4 times where once would be",
    "8.3 never exchanged": "exercise 8.3, accumulate(model, batches) on 2 ranks: wrong result\n",
    "8.4 not averaged": "rank 0 should hold [90, 90] in running_mean but holds [180, 180]\n",
    "8.4 counts summed": "rank 0 should hold [3] in num_batches_tracked but holds [6]\n",
    "8.4 parameters changed": "in weight but holds [2, 2]\n",
    "8.5 all save": "on 2 ranks: right, but rank 1 saved as well\n",
    "8.5 barrier on some": "on 2 ranks: it deadlocks\n",
    "10.3 too many bytes": "right, but 32 bytes were sent in collectives by rank 0 where 16 would",
    "10.3 float16": "but holds [inf, inf, inf]",
    "10.3 not the sum": "(bfloat16 of shape (8,) instead of float32 of shape (8,))\n",
    "11.1 rank as device": "exercise 11.1, my_place(2) on 4 ranks: wrong result\n",
    "11.1 no cpu": "exercise 11.1, my_place(0) on 4 ranks: wrong result\n",
    "11.2 rank 0 only": "rank 1 should hold [5, 6, 7] in weights but holds [1, 1, 1]\n",
    "11.2 not copied": "exercise 11.2, resume with a checkpoint on 2 ranks: wrong result\n",
    "11.2 wrong step": "rank 1 should return 3 but returns 4\n",
    "11.2 not step 0": "exercise 11.2, resume without a checkpoint on 2 ranks: wrong result\n",
    "11.2 weights changed": "rank 0 should hold [1, 1, 1] in weights but holds [0, 0, 0]",
    "11.3 no list": "rank 0 should return [0, 1] but returns (0, 1)\n",
    "11.3 equal hosts": "ranks_here(store, host, local_world_size) on 2 ranks: wrong result\n",
    "12.1 one time only": "two_costs(8, 4000, 1, 0) on 1 rank: it returns 14.0\n",
    "12.1 once round": "two_costs(8, 4000, 1, 0) on 1 rank: it should return 14 for the seconds of "
    "the ring but returns 7\n",
    "12.1 whole swaps": "7,000 for the seconds of halving-doubling but returns 24,000\n",
    "12.1 others left out": "two_costs(6, 4000, 1, 0) on 1 rank: it should return 6 for",
    "12.1 price left out": "two_costs(8, 4000, 2e-05, 2e-10) on 1 rank: it should return 0.000281",
    "12.2 not scaled": "learning_rate(5000, 8192, 1000) on 1 rank: it should return 3.2 but retur",
    "12.2 too early": "learning_rate(999, 8192, 1000) on 1 rank: it should return 3.1969 but retu",
    "12.2 no warm-up": "learning_rate(0, 8192, 0) on 1 rank: it should return 3.2 but returns 0.1",
    "12.3 not rounded up": "ranks_needed(6.7e+09, 3e+10, 3) on 1 rank: it should return 4 but ret",
    "12.3 never fits": "should return None but returns inf\n",
    "12.3 none though it fits": "should return 4 but returns None\n",
    "12.4 wrong operations": "should return 0.412308 but returns 0.137436\n",
    "12.4 one peak": "mfu(25600, 8, 6.7e+09",
    "12.4 percentage": "should return 0.412308 but returns 41.2308\n",
    "17.2 not divided": "exercise 17.2, backward(stage, x, target, 2) on 2 ranks: wrong result\n",
    "17.3 one too many": "exercise 17.3, micro_batches(4, 0.1) on 1 rank: it should return 27 but",
    "20.2 wrong bytes": "smallest_stage(7.5e+09, 64, 2e+10) on 1 rank: it returns 1 where 2 is "
    "right\nstages 0 to 3 need 120.0, 31.4, 16.6, 1.9 GB on a rank, and it has 20 GB\n",
    "20.2 nothing fits": "it returns 4 where None is right\n",
    "20.3 not in order": "where ['tp'] is right\n",
    "20.3 too many ranks": "these are 512 ranks, and a host has 8\n",
    "20.3 stops early": "these are 4 ranks, and a host has 16\n",
    "20.3 no list": "it returns {'tp'} where ['tp'] is right\n",
    "20.4 no attention": "exercise 20.4, step_seconds(126, 16384, 4.05e+11, 8192, 1.68e+07, ",
    "21.1 set back": "a rank waits for the others forever; the flags are [0, 1]",
    "21.1 no flag raised": "holds 'a rank waits for the others forever'",
    "21.2 two barriers": "right, but 2 barriers in place of 1",
    "21.4 one by one": "exercise 21.4, Backend(store, rank, size, timeout) on 2 ranks: ",
}


@pytest.mark.parametrize("section", CHANGED)
def test_a_changed_solution_makes_its_mistake(section):
    number, mistake = section.split(" ", 1)
    answer = solved(number, {hints()[section].replace: hints()[section].by})
    assert_mistake(check_of(number), answer, mistake, FACTS.get(section, ""))


def test_all_facts_are_looked_for():
    assert FACTS.keys() <= set(CHANGED)
