"""ZeRO by hand and PyTorch's own: values, bits, bytes and memory, and what is easily wrong."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections import namedtuple
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ddp_kit as kit
from ddp_kit.lessons import _gpt, _zero, zero
from ddp_kit.lessons.device_mesh import sent_by_tcp

pytestmark = pytest.mark.usefixtures("forked_ranks")

# With a smaller eps, Adam makes the rounding errors of tiny gradients as large as its steps.
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-5),
}


@contextmanager
def one_thread():
    """Add up in the order in which a rank with one thread does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_get_the_bits_of_one_process_that_adds_two_halves(name):
    def bits(rank, world_size):
        make = OPTIMIZERS[name]
        torch.set_num_threads(1)
        found = {}
        for way in zero.WAYS:
            stage = partial(zero.starter(way), optimizer_cls=make)
            parameters = zero.learn(rank, world_size, stage)["parameters"]
            found[way] = kit.compare(parameters, alone, rtol=0, atol=0).text
        return found

    with one_thread():
        alone = train_in_halves(OPTIMIZERS[name])
    for found in kit.run(bits, world_size=2):
        assert {
            way for way in found if not found[way].startswith("equal: 24 values, without")
        } == set(), found


def train_in_halves(make):
    """Train a GPT in this process, and add the gradients of two halves of each batch."""
    model = zero.make_gpt()
    optimizer = make(model.parameters())
    for batch in zero.batches(zero.BATCH, 3):
        optimizer.zero_grad()
        for part in range(2):
            (zero.loss_of(model, *zero.part_of(batch, part, 2)) / 2).backward()
        optimizer.step()
    return zero.copies(model)


class OwnLinear(nn.Module):
    """Like nn.Linear, but of a class that no library knows."""

    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class OwnEmbedding(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def forward(self, tokens):
        return self.weight[tokens]


class Halves(nn.Module):
    """Returns two tensors, and has a weight of three dimensions."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 6, 3))

    def forward(self, x):
        return x @ self.kernel[0], x @ self.kernel[1]


class Odd(nn.Module):
    """Rows that do not divide, a tied, a frozen, an unused and a repeated weight, and a scalar."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.embedding = OwnEmbedding(11, 6)
        self.frozen = OwnLinear(6, 6)
        self.frozen.requires_grad_(False)
        self.repeated = OwnLinear(6, 6)
        self.halves = Halves()
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(5, 1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(6))

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens)) + self.shift
        x = torch.relu_(self.repeated(x))
        x = self.repeated(x)
        x = self.norm(torch.cat(self.halves(x), -1))
        return self.head(x) * self.scale


def train_odd(optimizer_cls, rank=0, world_size=1, wrap=None, accumulate=1):
    """Train an Odd on a part of each batch; return its parameters by name.

    wrap: returns a model, its parameters, and functions for before and after a step, and for all
    parameters at the end.
    """
    torch.manual_seed(0)
    model = Odd()
    own = (model, model.parameters(), zero_nothing, zero_nothing, partial(zero.copies, model))
    model, parameters, finish, after, full = wrap(model) if wrap else own
    optimizer = optimizer_cls(parameters)
    torch.manual_seed(1)
    for tokens in torch.randint(11, (3, accumulate, 12, 5)):
        optimizer.zero_grad()
        for piece in tokens:
            mine = piece.chunk(world_size)[rank]
            logits = model(mine[:, :-1]).flatten(0, 1)
            (F.cross_entropy(logits, mine[:, 1:].flatten()) / accumulate).backward()
        finish()
        optimizer.step()
        after()
    model(tokens[0])  # a forward without a backward leaves nothing behind
    return full()


def zero_nothing():
    pass


def stage_2(model):
    sharded = zero.ShardedGradients(model.parameters())
    full = partial(zero.copies, model)
    return model, sharded.rows, sharded.finish_gradient_synchronization, sharded.gather, full


def stage_3(model):
    wrapped = zero.FullySharded(model)
    finish = wrapped.finish_gradient_synchronization
    return wrapped, wrapped.parameters(), finish, zero_nothing, wrapped.gather_full_params


STAGES = (stage_2, stage_3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_modules_of_any_class_and_shape_train_as_in_one_process(world_size):
    def worker(rank, world_size):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [
                train_odd(optimizer, rank, world_size, wrap, accumulate)
                for optimizer in OPTIMIZERS.values()
                for wrap in STAGES
                for accumulate in (1, 2)
            ]

    alone = [
        train_odd(optimizer, accumulate=accumulate)
        for optimizer in OPTIMIZERS.values()
        for _ in STAGES
        for accumulate in (1, 2)
    ]
    kit.compare(kit.run(worker, world_size=world_size), alone).check()


def test_stage_3_starts_as_rank_0_and_keeps_rows_and_frees_the_rest():
    def worker(rank, world_size):
        torch.manual_seed(rank)
        model = zero.FullySharded(Odd())
        rows = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
        start = model.gather_full_params()
        seen = []
        for module in model.module.modules():
            module.register_forward_pre_hook(lambda *_: seen.append(in_memory(model)))
        for _ in range(2):  # the second forward knows the order, and prefetches
            model(torch.arange(8).view(2, 4)).sum().backward()
            late = in_memory(model)
            model.finish_gradient_synchronization()
        return rows, start | {"shift": model.module.shift}, seen, late, in_memory(model)

    def in_memory(model):
        own = model.own.items()
        names = {module: name for name, module in model.module.named_modules()}
        return {names[m] for m, kept in own if any(p.memory.nbytes() for p in kept.values())}

    torch.manual_seed(0)
    whole = Odd()
    first = zero.copies(whole) | {"shift": whole.shift}
    for rows, start, seen, late, after in kit.run(worker, world_size=4):
        kit.compare(start, first, rtol=0, atol=0).check()
        assert rows == {
            "scale": (1,),
            "embedding.weight": (3, 6),  # of 11
            "frozen.weight": (2, 6),
            "frozen.bias": (2,),
            "repeated.weight": (2, 6),
            "repeated.bias": (2,),
            "halves.kernel": (1, 6, 3),
            "norm.weight": (2,),
            "norm.bias": (2,),
            "unused.weight": (1, 5),
            "unused.bias": (1,),
        }
        # No gradient frees the second; the first was fetched once more, for a module inside it.
        assert late == {"", "frozen"}
        assert after == set()
        tied = {"embedding", "head"}
        assert seen[:4] == [{""}, {"", *tied}, {"", "frozen"}, {"", "repeated"}]
        assert seen[8:11] == [{"", *tied}, {"", *tied, "frozen"}, {"", "frozen", "repeated"}]


Named = namedtuple("Named", "left right")


class Nested(nn.Module):
    """Returns tensors in a dict, a named tuple and a list, and something that is no tensor."""

    def __init__(self, make=lambda left, right: {"a": Named(left, 1), "b": [right, None]}):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.make = make

    def forward(self, x):
        out = x @ self.weight
        return self.make(out[:, :1], out[:, 1:])


def test_stage_3_finds_the_tensors_in_dicts_and_named_tuples():
    def worker(rank, world_size):
        model = zero.FullySharded(Nested())
        x = torch.ones(3, 4, requires_grad=True)
        found = model(x)
        empty = [each.memory.nbytes() for each in model.sharded]
        (found["a"].left.sum() + 2 * found["b"][0].sum()).backward()
        model.finish_gradient_synchronization()
        return empty, model.module.weight.grad, x.grad

    for empty, gradient, of_x in kit.run(worker, world_size=2):
        assert empty == [0]
        kit.compare(gradient, torch.tensor([[3.0, 6.0]] * 2)).check()
        kit.compare(of_x, torch.tensor([[2.0, 8.0, 14.0, 20.0]] * 3)).check()  # needs the weight


def test_stage_3_refuses_an_output_in_which_it_would_miss_tensors():
    def worker(rank, world_size):
        model = zero.FullySharded(Nested(lambda *tensors: SimpleNamespace(a=tensors)))
        with torch.no_grad():
            assert len(model(torch.ones(3, 4)).a) == 2
        model(torch.ones(3, 4))

    words = "a tensor, or a tuple, list or dict of tensors, got a value of type SimpleNamespace"
    with pytest.raises(kit.RankError, match=words):
        kit.run(worker, world_size=1)


def test_stage_3_keeps_no_gradient_that_was_given_back():
    def worker(rank, world_size):
        model = zero.FullySharded(Nested())
        model(torch.ones(3, 4))["a"].left.sum().backward()
        model.finish_gradient_synchronization()
        gradient = weakref.ref(model.module.weight.grad)
        assert gradient() is not None
        model.zero_grad()
        return gradient() is None

    assert list(kit.run(worker, world_size=2)) == [True, True]


def test_main_refuses_a_world_size_before_it_trains(monkeypatch):
    monkeypatch.setattr(_zero, "BATCH", 3)
    with pytest.raises(kit.PoolError, match="must divide the 3 sequences of a batch, got 2"):
        zero.main(["--world-size", "2"])


def test_each_parameter_has_its_state_on_one_rank_and_shares_are_about_equal():
    def worker(rank, world_size):
        model = zero.make_gpt()
        optimizer = zero.ShardedStep(model.parameters(), torch.optim.Adam, lr=1e-3)
        zero.loss_of(model, *next(zero.batches(2, 1))).backward()
        optimizer.step()
        part = optimizer.state_dict()
        assert part["param_groups"][0]["betas"] == (0.9, 0.999)  # Adam's own default
        return {key: state["exp_avg"].numel() for key, state in part["state"].items()}

    shares = list(kit.run(worker, world_size=3))
    assert sorted(key for share in shares for key in share) == list(range(24))
    sizes = [sum(share.values()) for share in shares]
    assert sum(sizes) == 111_232
    assert max(sizes) < 1.3 * min(sizes)


def test_the_formula_of_memory_divides_what_a_stage_shards():
    def formula(way):
        return list(zero.expected_memory(way, "Adam", 1000, 4).values())

    assert formula("DDP") == [4000, 4000, 8000]
    assert formula("stage 1") == formula("ZeroRedundancyOptimizer") == [4000, 4000, 2000]
    assert formula("stage 2") == [4000, 1000, 2000]
    assert formula("stage 3") == formula("fully_shard") == [1000, 1000, 2000]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_rank_holds_what_the_formula_says(n):
    for way in zero.WAYS:
        held = [rank["held"] for rank in kit.run(zero.learn, zero.starter(way), 1, world_size=n)]
        for rank in held:
            assert rank.pop("gathered parameters") == rank.pop("gradients on their way") == 0
        for kind, wanted in zero.expected_memory(way, "Adam", 111_232, n).items():
            each = [rank[kind] for rank in held]
            assert sum(each) / n == pytest.approx(wanted, rel=0.02), (way, kind)
            # Whole parameters do not divide evenly among ranks, vectors stay whole.
            assert max(each) == pytest.approx(wanted, rel=0.35), (way, kind)


def test_explore_shows_what_ranks_hold_of_another_width():
    view = zero.explore("stage 2", "SGD with momentum", world_size=3, width=32)
    for held in view.result:
        assert held.pop("gathered parameters") == held.pop("gradients on their way") == 0
        expected = zero.expected_memory("stage 2", "SGD with momentum", 31_040, 3)
        assert held == pytest.approx(expected, rel=0.03)  # with the rows that fill up


def test_a_stage_3_rank_keeps_no_whole_weight():
    def worker(rank, world_size):
        model = zero.make_gpt()
        whole = [weakref.ref(each) for each in model.parameters() if each.ndim > 1]
        sharded = zero.FullySharded(model)
        gc.collect()
        return len(sharded.sharded), sum(each() is not None for each in whole)

    assert [left for _, left in kit.run(worker, world_size=2)] == [0, 0]


FORWARD, BACKWARD = "at most, in the forward", "at most, in the backward"


def watch(way, world_size):
    return kit.run(zero.watch_memory, zero.starter(way), world_size=world_size)


def test_a_stage_3_rank_gathers_two_modules_at_most_and_gives_gradients_back():
    result = watch("stage 3", 4)
    picture = {moment: [rank[moment] for rank in result] for moment in result[0]}
    assert list(picture) == ["before", FORWARD, BACKWARD, "after the step"]
    assert "gathered parameters" in repr(kit.plot.memory(picture))
    # The widest two that follow one another: 256 x 64 weights up, and as many down.
    two, whole = 4 * 2 * 256 * 64, 4 * 111_232
    for moments in result:
        kinds = {moment: held["gathered parameters"] for moment, held in moments.items()}
        assert kinds["before"] == kinds["after the step"] == 0
        assert two <= kinds[FORWARD] <= 1.1 * two
        assert 0 < kinds[BACKWARD] <= 1.3 * two < whole / 2
        assert moments["before"]["gradients"] == 0 < moments["after the step"]["gradients"]


def test_two_whole_gradients_at_most_are_on_their_way():
    whole = 4 * 111_232
    for way in ("stage 2", "stage 3"):
        for moments in watch(way, 2):
            kinds = {moment: held["gradients on their way"] for moment, held in moments.items()}
            assert kinds["before"] == kinds[FORWARD] == kinds["after the step"] == 0
            # Two gradients of 256 x 64 weights, and where the means of own rows arrive.
            assert 0 < kinds[BACKWARD] <= 1.5 * 4 * 2 * 256 * 64 < whole / 2
    moments = watch("DDP", 2)[0]
    assert all(held["gathered parameters"] == 0 for held in moments.values())
    assert moments[BACKWARD]["gradients"] == whole


def test_a_layer_computes_while_the_next_weight_and_two_gradients_travel():
    found = kit.run(zero.watch_layers, zero.stage_3, world_size=2)
    assert found[0] == found[1]
    lines = {
        (what, layer): (here, coming, leaving) for what, layer, here, coming, leaving in found[0]
    }
    assert len(lines) == len(found[0]) == 2 * 20
    for (what, layer), (here, coming, leaving) in lines.items():
        tied = {"head", "tokens"}
        assert layer in here
        assert len({*here} - {layer} - tied) == 0
        assert len({*coming} - tied) <= 1
        assert len({*leaving} - tied) <= (2 if what == "backward" else 0)
    assert lines["forward", "blocks.0.attention.key"][1] == ["blocks.0.attention.value"]
    assert lines["forward", "blocks.0.norm2"][1] == ["blocks.0.up"]
    assert lines["backward", "blocks.0.attention.value"][2] != []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a connection")
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_what_the_formulas_say_and_gloo_more(world_size):
    def worker(rank, world_size, way):
        counted = []
        for steps in (3, 4):
            dist.barrier()
            before = sent_by_tcp()
            zero.learn(rank, world_size, zero.starter(way), steps)
            dist.barrier()
            counted.append((sent_by_tcp() - before).total())
        return counted[1] - counted[0]

    run = partial(kit.run, world_size=world_size)
    model = zero.make_gpt()
    for way in ("DDP", "stage 1", "stage 2", "stage 3"):
        traced = zero.bytes_per_step(run, zero.learn, zero.starter(way))
        mean = sum(sum(sent.values()) for sent in traced) / world_size
        assert mean == pytest.approx(zero.expected_bytes(way, world_size, model), rel=1e-4)
        expected = sum(map(zero.on_gloo, traced)) / world_size
        assert (expected > mean) == (way in ("stage 2", "stage 3"))
        # The formula has the numbers that ranks need from each other, and so the least that a step
        # can send. Headers come on top, and by what two runs say besides they may differ a little.
        sent = sum(run(worker, way)) / world_size
        assert 0.98 * expected <= sent <= 1.06 * expected + 20_000, way
    weights = zero.expected_bytes("stage 3", 2, untied())
    assert weights / zero.expected_bytes("DDP", 2, untied()) == pytest.approx(1.5, abs=0.01)


def untied():
    return _gpt.GPT(_gpt.Config(tied=False))


def test_fully_shard_averages_on_gloo_and_needs_sums_for_another_factor():
    """Earlier versions added: https://github.com/pytorch/pytorch/issues/162338 ."""

    def worker(rank, world_size, remedy, reduce_dtype=None):
        layer = nn.Linear(1, 1, bias=False)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        remedy(layer)
        layer(torch.full((1, 1), float(rank + 1))).sum().backward()
        return layer.weight.grad.full_tensor().item()

    def gradient(*args):
        return set(kit.run(worker, *args, world_size=4))

    def add(layer):
        layer.set_gradient_divide_factor(1.0)

    def add_without_the_backend(layer):
        layer.set_force_sum_reduction_for_comms(True)
        add(layer)

    assert gradient(lambda layer: None) == {2.5}
    assert gradient(lambda layer: None, torch.bfloat16) == {2.5}
    with pytest.raises(kit.RankError, match=r"Cannot use ReduceOp\.PREMUL_SUM with Gloo"):
        gradient(add)
    assert gradient(add_without_the_backend) == {10.0}


def test_four_ranks_save_and_two_resume_as_one_process_trains(tmp_path):
    saved = str(tmp_path)
    kit.run(zero.train_and_save, saved, world_size=4)
    resumed = kit.run(zero.load_and_train, saved, world_size=2)
    kit.compare(resumed, zero.train_alone(zero.ADAM, 3)["parameters"]).check()
    assert not kit.compare(resumed, zero.train_alone(zero.ADAM, 2)["parameters"])


def test_an_unknown_way_is_refused_in_one_sentence():
    with pytest.raises(kit.PoolError, match=r"^way must be one of 'DDP', .*; got 'stage3'$"):
        zero.hold(0, 1, "stage3")
