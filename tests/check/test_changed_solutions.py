"""Solutions with a change are wrong answers, whose mistakes are found and explained."""

from __future__ import annotations

import pytest
from answers import assert_mistake, check_of, solved

from ddp_kit.check.hints import hints

pytestmark = pytest.mark.usefixtures("forked_ranks")

CHANGED = [name for name, hint in hints().items() if hint.replace and name[0].isdigit()]

# What the message says of the changes in the .ini files.
FACTS = {
    "1.1 nothing added": "exercise 1.1, ping_pong(counter, rounds=1) on 2 ranks: wrong "
    "result\nrank 0 should hold [2] but holds [1]\n",
    "1.2 one ring hangs": "shift(tensor, distance=2) on 4 ranks: it deadlocks\n",
    "1.2 not blocking": "right, but isend was called 1 time: none is needed\n",
    "1.3 not received": "rank 0 should hold [10, 11, 12] but holds [nan, nan, nan]\n",
    "1.6 waits for the slowest": "tag=7",
    "2.1 received twice": "right, but 40 bytes were sent: 20 are enough\n",
    "2.2 no partner": "tree_reduce(tensor) on 5 ranks: wrong result\nrank 0 should hold [150, "
    "155, 160, 165, 170] but holds [100, 104,",
    "2.5 leaves early": "barrier() on 2 ranks: a rank may leave too early\nrank 1 leaves without "
    "having heard of rank 0\n",
    "2.5 too many messages": "right, but 5 messages were sent where 4 would be enough\n",
    "2.10 unbalanced": "right, but a rank has 152 of 256 numbers, more than twice 64",
    "2.10 all to all ranks": "bytes were sent by rank 0 where 512 would be enough",
    "2.11 no goal": "where at most 55 are the first goal",
    "2.11 own pieces": "rank 1 should return [1, 11, 21, 31, 41, 51] but returns [10, 11",
    "3.1 not weighted": "exercise 3.1, average_weighted(model, digits) with 1 and 3 digits on 2 "
    "ranks: wrong result\nrank 0 should hold [105.5, 106.5, 107.5, 108.5, 109.5, 110.5] in "
    "0.weight.grad but holds [90.5, 91.5, 92.5, 93.5, 94.5, 95.5]\n",
    "3.1 too much sent": "right, but rank 0 called 9 collectives: 5 are enough\n",
    "3.2 too few calls": "most=10) on 2 ranks: right, but an all_reduce has 100 bytes: 40 are "
    "enough\n",
    "3.4 too much travels": "right, but rank 0 called 6 collectives: 3 are enough",
    "4.1 as in the lesson": "exercise 4.1, reduce_scatter(output, pieces of lengths [3, 3]) on 2 "
    "ranks: wrong result\nrank 0 should hold [30, 32, 34] in output but holds [36, 38, 40]\n",
    "4.2 sent whole": "on 2 ranks: right, but rank 0 sent a message of 120 bytes: 40 are enough\n",
    "4.2 waits for all": "pipelined_ring(tensor of 60, pieces=3) on 2 ranks: right, but rank 0 "
    "waited for 3 pieces before it passed on the first: 1 is enough\n",
    "4.3 slow if small": "beta=1e-09) on 4 ranks: right, but it takes 306 microseconds "
    "on this wire: 108 are enough, and 113 are allowed\n",
    "4.4 no goal": "rounds where at most 6 are the first goal",
    "5.1 rank chooses gpu": "place(environ, gpus=2), 2 hosts on 4 ranks: wrong result\nrank 2 "
    "should return ('cuda:0', 'nccl') but returns ('cuda:2', 'nccl')\n",
    "5.2 not set": "rank 0 should hold 4 in torch.get_num_threads() but holds 7\n",
    "6.2 nobody waits": "[0, 2] in how many have left the first barrier when 1 and 2 have come but",
    "6.2 same keys": "second barrier when 1 and 2 have come but holds [1, 2]",
    "6.3 waits too long": "should hold True in whether it takes less than 3 s but holds False",
    "7.1 fails": "exercise 7.1, scatter_batch(batch, [2, 1], 3) on 2 ranks: it raised an error",
    "8.2 ranks communicate": "on 2 ranks: barrier was called\n",
    "8.2 not filled up": "range(23), seed=7) on 2 ranks: rank 1 should get 12 positions\nrank 0 g",
    "8.2 same order": "on 2 ranks: epochs 0 and 1 have the same order\n",
    "8.2 only rotated": "on 1 rank: epochs 0 and 1 have the same order, only starting at a differ",
    "8.2 process seeded": "on 2 ranks: it changed the random state of the whole process\n",
    "8.2 generator goes on": "epoch 0 has a different order the second time\n",
    "8.4 counts summed": "rank 0 should hold 3 in num_batches_tracked but holds 6\n",
    "8.5 all save": "rank 1 should hold 0 in the files that this rank saves but holds 1\n",
    "10.3 float16": "but holds [inf, inf, inf]",
    "11.1 rank as device": "exercise 11.1, my_place(2) on 4 ranks: wrong result\n",
    "11.2 not step 0": "rank 0 should hold 0 in the step without a checkpoint but holds 1\n",
    "12.1 once round": "two_costs(8, 4000, 1, 0): wrong result\nit should hold 14 "
    "in the seconds of the ring but holds 7\n",
    "12.4 percentage": "should return 0.412308 but returns 41.2308\n",
    "17.2 not divided": "exercise 17.2, backward(stage, x, target, 2) on 2 ranks: wrong result\n",
    "21.1 set back": "a rank waits for the others forever; the flags are [0, 1]",
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
