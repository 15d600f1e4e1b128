"""Mistakes that many exercises have, or that are made in another way than the .ini files say."""

from __future__ import annotations

import pytest
from answers import assert_mistake, check_of, solved

pytestmark = pytest.mark.usefixtures("forked_ranks")

# Of an exercise, a mistake; what its solution has, and what is there instead.
OTHERS = [
    ("1.3", "unchanged", "tensor += arriving", "tensor = tensor + arriving"),
    ("1.3", "collective", "    if rank > 0", "    dist.all_reduce(arriving)\n    if rank > 0"),
    ("2.1", "", "dist.recv(tensor, src)", "dist.recv(tensor, 0)"),
    ("2.1", "", "if other != src]", "if other != src or world_size == 1]"),
    ("2.2", "upwards", "tensor += arriving", "tensor = tensor + arriving"),
    ("2.4", "otherwise", "return pieces if", "return pieces[::-1] if"),
    ("2.4", "", "torch.empty(length.item())", "torch.empty(5)"),
    (
        "2.10",
        "unbalanced",
        "(gathered, samples)",
        "(gathered, samples)\n    gathered = gathered[:1] * world_size",
    ),
    ("3.1", "not weighted", "gradient *= digits / total", "pass"),
    ("3.1", "unchanged", "for gradient in gradients:", "for gradient in []:"),
    (
        "3.1",
        "too much sent",
        "dist.all_reduce(gradient)",
        "__import__('ddp_kit.lessons.ring_allreduce').lessons.ring_allreduce.chunked_ring(gradient"
        ")",
    ),
    ("3.2", "otherwise", "in buckets:", "in buckets[:1]:"),
    ("3.2", "too much sent", "room = most", "room = max(1, most - 1)"),
    (
        "3.4",
        "too much travels",
        "dist.all_reduce(sums)",
        "dist.all_reduce(wide := torch.cat([sums] * 20))\n        sums = wide[: len(sums)]",
    ),
    (
        "4.1",
        "too many bytes",
        "            exchange(passing",
        "            exchange(passing, right, arriving, left)\n            exchange(passing",
    ),
    ("4.1", "otherwise", "(rank - 1 - step)", "(rank + 1 - step)"),
    (
        "4.1",
        "lengths",
        "  exchange(",
        "  arriving = torch.zeros_like(pieces[0])\n            exchange(",
    ),
    (
        "4.3",
        "slow if large",
        "2 * (n - 1) * (alpha + tensor.nbytes / n * beta) < doubling",
        "tensor.nbytes > 10_000",
    ),
    ("4.3", "unchanged", "    arriving = ", "    tensor = tensor.clone()\n    arriving = "),
    ("4.4", "unchanged", "tensor.copy_(plus(four, two, 4))", "pass"),
    ("4.4", "collective", "    two = plus", "    dist.barrier()\n    two = plus"),
    ("5.1", "environ misread", 'environ.get("LOCAL_RANK", 0)', 'environ["LOCAL_RANK"]'),
    (
        "5.1",
        "another form",
        'return f"cuda:{local_rank}", "nccl"',
        'return (f"cuda:{local_rank}",)',
    ),
    ("5.1", "otherwise", '"nccl"', 'str("gloo")'),
    ("5.2", "bad number", "max(1, cores // ranks_here)", "cores // ranks_here"),
    ("5.a", "fails", "    dist.barrier()", "    if dist.get_rank() == 0:\n        dist.barrier()"),
    ("6.1", "otherwise", "sizes[: names.index(host)]", "sizes[names.index(host) + 1 :]"),
    ("7.1", "fails", "batch.split(sizes)", "batch.chunk(len(sizes))"),
    ("7.1", "otherwise", "return mine", "return mine[:, : 1 + rank]"),
    ("7.2", "no graph", "return F", "return None and F"),
    ("8.2", "not filled up", "order * self.world_size", "order * 2"),
    ("8.2", "positions lost", "order[self.rank ::", "order[0 ::"),
    ("8.2", "same order", "len(data), seed, 0", "len(data), 0, 0"),
    ("8.5", "read too early", "    dist.barrier()", "        dist.barrier()"),
    ("9.11", "fails", "    mine, steps", "    batches[dist.get_world_size()]\n    mine, steps"),
    ("10.1", "otherwise", "ReduceOp.MAX", "ReduceOp.MIN"),
    (
        "10.3",
        "too many bytes",
        "    tensor.copy_",
        "    dist.all_reduce(small.clone())\n    tensor.copy_",
    ),
    ("11.1", "otherwise", 'f"cuda:{local_rank}"', '"cuda"'),
    ("11.2", "rank 0 only", "    dist.broadcast", "    found[0] and dist.broadcast"),
    ("12.1", "others left out", "core = 2 ** (n.bit_length() - 1)", "core = n"),
    ("12.2", "not scaled", "batch / REFERENCE", "(batch / REFERENCE) ** 0.5"),
    ("12.2", "wrong beginning", "* step / warm", "* (step + 1) / warm"),
    ("12.2", "no warm-up divides", "if step >= warmup", "if step >= max(1, warmup)"),
    ("12.3", "otherwise", "(16, 4, 2, 0)", "(16, 0, 2, 0)"),
    ("13.2", "fails", "with torch.enable_grad():", "if True:"),
    ("14.1", "otherwise", "return ", "return 0 * "),
    ("14.3", "too many bytes", "    return mine", "    dist.all_reduce(x)\n    return mine"),
    ("15.1", "stuck", "            dist.broadcast(", "            rank or dist.broadcast("),
    ("15.1", "", "src=owner)", "src=owner, async_op=True)"),
    ("15.1", "otherwise", "step()\n", "step()\n        optimizer.param_groups[0]['lr'] *= 2\n"),
    ("16.2", "otherwise", "return mine + bias", "return x"),
    (
        "16.4",
        "target as index",
        "wanted = ",
        "wanted = logits.gather(1, targets.unsqueeze(1)) or ",
    ),
    ("17.1", "another form", "    first = min", "    return 7\n    first = min"),
    ("17.2", "nothing to send", "x.requires_grad_()", "x"),
    ("17.2", "no graph", "y = stage(", "y = torch.no_grad()(stage)("),
    ("17.2", "not sent", "dist.send(x.grad, dst=rank - 1)", "pass"),
    ("17.2", "no gradient passed", "y.backward(gradient)", "y.backward()"),
    (
        "18.2",
        "otherwise",
        "return keys <= queries[:, None]",
        "return 1.0 * (keys <= queries[:, None])",
    ),
    ("20.3", "otherwise", "sorted(sent, key=sent.get, reverse=True)", "sent"),
    ("20.4", "another form", "return per_token", "return None and per_token"),
    ("21.1", "other flag", "flags[rank] += 1", "flags[(rank + 1) % len(flags)] += 1"),
    ("21.2", "other slot", "pairs[call % 2]", "pairs[call + 2]"),
    (
        "21.2",
        "otherwise",
        "tensor += slots[1 - rank]",
        "slots[0].add_(slots[1])\n    barrier()\n    tensor.copy_(slots[0])",
    ),
    ("21.3", "other slot", "slots[rank].copy_", "slots[len(slots)].copy_"),
    ("21.4", "too large pieces", "ROOM // flat.itemsize", "len(flat)"),
    ("21.4", "no work", "return Finished(tensors)", "return None"),
    ("2.a", "reduced to one", "dist.all_reduce(sums)", "dist.reduce(sums, dst=0)"),
    ("9.b", "reduced to one", "dist.all_reduce(total)", "dist.reduce(total, dst=0)"),
    ("1.a", "another form", "return received.item()", "return received"),
]


@pytest.mark.parametrize(("number", "mistake", "right", "wrong"), OTHERS)
def test_another_change_makes_its_mistake(number, mistake, right, wrong):
    assert_mistake(check_of(number), solved(number, {right: wrong}), mistake)
