"""`kit.compare`: equal up to rounding, or which mistake it is, on plain tensors and real ranks."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from nbval.plugin import get_sanitize_patterns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_kit as kit
from ddp_kit.pool import Result
from ddp_kit.trace import Trace

pytestmark = pytest.mark.usefixtures("forked_ranks")
N = 4


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ranks(*values):
    return Result(values, ("",) * len(values), Trace((), len(values)))


def assert_differs(comparison, cause, *words, rank=..., name=...):
    assert not comparison
    assert comparison.cause == cause, comparison
    for word in words:
        assert word in str(comparison), comparison
    assert rank in (..., comparison.rank), comparison
    assert name in (..., comparison.name), comparison


# --- rounding ------------------------------------------------------------------------------


def test_nbval_does_not_compare_what_depends_on_the_processor():
    """Two roundings differ in size, place and tolerance; a mistake is another text."""
    config = Path(__file__).with_name("notebooks") / "sanitize.cfg"
    texts = []
    for place, far, size in (("a", 1e-7, 1), ("b", 3e-6, 50)):
        reference = {"a": torch.full((2,), float(size)), "b": torch.full((2,), float(size))}
        given = reference | {place: reference[place] + far}
        texts.append(str(kit.compare(ranks(given, reference), reference)))
    texts.append(str(kit.compare(ranks(reference), {"a": torch.zeros(2), "b": torch.ones(2)})))
    assert "up to rounding" in texts[0]
    assert "up to rounding" in texts[1]
    compared = []
    for text in texts:
        for pattern, new in get_sanitize_patterns(config.read_text()):
            text = re.sub(pattern, new, text)
        compared.append(text)
    assert texts[0] != texts[1]
    assert compared[0] == compared[1] != compared[2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [4, 7, 64, 500])
@pytest.mark.parametrize("signs", ["mixed", "positive"])
def test_a_sum_in_another_order_is_never_a_bug(dtype, terms, signs):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn((terms, 8), generator=generator, dtype=torch.float64)
        numbers = (numbers if signs == "mixed" else numbers.abs()).to(dtype)
        shuffled = numbers[torch.randperm(terms, generator=generator)]
        by_ranks = sum(sum(part) for part in shuffled.tensor_split(N))  # one after another
        found = kit.compare([by_ranks] * N, sum(numbers), terms=terms)
        assert found, (seed, found)
        assert found.cause is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64])
@pytest.mark.parametrize("seed", range(20))
def test_an_error_of_a_thousandth_is_never_rounding(dtype, seed):
    right = random(6, 5, seed=seed, dtype=dtype)
    wrong = right.clone()
    place = seed % 30
    wrong.view(-1)[place] += 1e-3 * right.abs().max()
    found = kit.compare([right, wrong, right, right], right)
    assert_differs(found, "drift", f"at [{place // 5}, {place % 5}]", rank=1)
    assert found.max_error == pytest.approx(1e-3 * right.abs().max().item(), rel=1e-3)
    assert found.max_error > 50 * found.tolerance


def test_the_tolerance_follows_from_dtype_terms_and_scale_and_says_so():
    found = kit.compare(torch.tensor([0.5, 2.0 + 1e-6]), torch.tensor([0.5, 2.0]), terms=100)
    assert found.equal
    eps = torch.finfo(torch.float32).eps
    assert found.tolerance == pytest.approx(4 * 10 * eps * 2)
    assert found.max_error == pytest.approx(1e-6, rel=0.1)
    assert str(found) == (
        "equal up to rounding: 1 value; the largest difference is 9.5e-07, "
        "where 9.5e-06 is allowed."
    )
    too_far = kit.compare(torch.tensor([0.5, 2.1]), torch.tensor([0.5, 2.0]), terms=100)
    why = "4 * sqrt(100 terms) * eps(float32) * 2, the largest number in the reference."
    assert f"The tolerance is 9.5e-06 = {why}" in str(too_far)
    assumed = kit.compare(torch.tensor([2.1]), torch.tensor([2.0]))
    assert "sqrt(1,024 terms, assumed)" in str(assumed)
    half = kit.compare(torch.ones(2).half() * 1.5, torch.ones(2).half())
    assert "sqrt(16 terms, assumed) * eps(float16) * 1" in str(half)


def test_a_difference_that_more_terms_would_explain_says_how_many():
    found = kit.compare(torch.tensor([1.0 + 1e-4]), torch.tensor([1.0]))
    assert_differs(found, None, "6.6 times what rounding explains")
    needed = int(str(found).split("terms=")[1].split()[0])
    assert kit.compare(torch.tensor([1.0 + 1e-4]), torch.tensor([1.0]), terms=needed)
    assert not kit.compare(torch.tensor([1.0 + 1e-4]), torch.tensor([1.0]), terms=needed // 2)
    drifted = kit.compare([1.0, 1.0 + 1e-4], 1.0)
    assert_differs(drifted, "drift", "rank 0 equals the reference", "pass terms=")
    far = kit.compare({"x": random(20)}, {"x": random(20, seed=1)})
    assert_differs(far, None, "It is none of the mistakes that kit.compare recognizes.", name="x")


def test_rtol_and_atol_replace_the_rule():
    one, other = torch.tensor([1.0, 100.0]), torch.tensor([1.1, 100.0])
    assert kit.compare(one, other, atol=0.11)
    assert not kit.compare(one, other, atol=0.09)
    assert kit.compare(one, other, rtol=0.1)
    found = kit.compare(one, other, rtol=0.05)
    assert_differs(found, None, "1.8 times the tolerance", "(rtol=0.05, atol=0)", "at [0]")
    assert found.tolerance == pytest.approx(0.055)
    barely = kit.compare(torch.tensor([1.0 + 1e-6]), torch.tensor([1.0]), rtol=0, atol=0)
    assert_differs(barely, None, "The tolerance is 0 (rtol=0, atol=0)")
    assert kit.compare(one, one, rtol=0, atol=0).max_error == 0


def test_zeros_in_the_reference_allow_nothing():
    found = kit.compare(torch.tensor([0.0, 1e-12]), torch.zeros(2))
    assert_differs(found, None, "The tolerance is 0, as the reference is")
    assert kit.compare(torch.zeros(2), -torch.zeros(2))


# --- the usual mistakes --------------------------------------------------------------------

RIGHT = {"weight": random(8, 4, seed=1), "bias": random(8, seed=2)}


def changed(change):
    return {name: change(tensor) for name, tensor in RIGHT.items()}


def test_a_sum_instead_of_a_mean():
    found = kit.compare([changed(lambda t: 4 * t)] * N, RIGHT)
    assert_differs(
        found,
        "summed",
        "It is 4 times the reference: it was summed and not averaged. Divide it by the world size.",
        "In all, 2 of 2 values differ on all 4 ranks.",
        rank=0,
        name="weight",
    )
    alone = kit.compare(changed(lambda t: 3 * t), RIGHT)
    assert_differs(alone, "scaled", "It is 3 times the reference.", rank=None)


def test_a_mean_of_a_mean():
    found = kit.compare([changed(lambda t: t / 4)] * N, RIGHT)
    assert_differs(found, "averaged twice", "It is 1/4 of the reference")


def test_another_factor_is_named_but_not_of_a_few_numbers():
    found = kit.compare([changed(lambda t: 2.5 * t)] * N, RIGHT)
    assert_differs(found, "scaled", "It is 2.5 times the reference.")
    assert kit.compare([7.0] * N, 2.0).cause is None
    assert_differs(kit.compare([8.0] * N, 2.0), "summed")
    coarse = torch.tensor(8.0).bfloat16(), torch.tensor(2.0).bfloat16()
    assert kit.compare([coarse[0]] * N, coarse[1]).cause is None


def test_a_replica_that_drifts():
    drifted = {"weight": RIGHT["weight"], "bias": RIGHT["bias"] + 0.1}
    found = kit.compare([RIGHT, RIGHT, drifted, RIGHT], RIGHT)
    assert_differs(
        found,
        "drift",
        "ranks 0, 1 and 3 equal the reference: replicas have drifted",
        "In all, 1 of 2 values differs on rank 2.",
        rank=2,
        name="bias",
    )
    barely = RIGHT["bias"].clone()
    barely[0] += 2 * found.tolerance
    found = kit.compare([RIGHT["bias"]] * 3 + [barely], RIGHT["bias"])
    assert_differs(found, "drift", "ranks 0, 1 and 2 equal the reference", rank=3)
    all_of_them = kit.compare([changed(lambda t, r=r: t + 0.1 * r) for r in range(1, 5)], RIGHT)
    assert_differs(all_of_them, "drift", "no rank equals the reference", rank=0)


def test_gradients_that_were_never_reduced():
    own = [random(5, seed=rank) for rank in range(N)]
    found = kit.compare(own, torch.stack(own).mean(0))
    assert_differs(found, "not reduced", "The mean of all ranks' values is the reference")
    assert_differs(kit.compare(own, torch.stack(own).sum(0)), "not reduced", "The sum of all")
    assert_differs(kit.compare([0.0, 1.0, 2.0, 3.0], 6.0), "not reduced")


def test_zeros_that_were_never_written():
    whole = random(8, 8)
    found = kit.compare([whole, torch.zeros(8, 8)], whole)
    assert_differs(found, "zeros", "nothing was written into it", rank=1)
    assert_differs(kit.compare([whole, torch.zeros(8, 8)], ranks(whole, whole)), "zeros", rank=1)


def test_nan_and_infinity():
    inf, nan = math.inf, math.nan
    right = torch.tensor([1.0, inf, -inf, nan])
    found = kit.compare([right] * 2, right)
    assert found
    assert "NaN is in both, and counts as equal." in str(found)
    for wrong in ([nan, inf, -inf, nan], [1.0, -inf, -inf, nan], [1.0, inf, -inf, 0.0]):
        found = kit.compare([torch.tensor(wrong)] * 2, right, rtol=1.0, atol=5.0)
        assert_differs(found, "not finite")
        assert found.max_error == inf
    assert_differs(
        kit.compare(torch.tensor([nan, 2.0]), torch.ones(2)), "not finite", "nan instead of 1"
    )


# --- what may be compared ------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def test_models_and_their_state_dicts_with_buffers():
    model = net()
    assert kit.compare(model, net())
    assert kit.compare([model.state_dict()] * 2, model)
    model.norm.num_batches_tracked += 3
    found = kit.compare(model, net())
    words = "differs by 3 (3 instead of 0)", "The tolerance is 0: integers must be equal."
    assert_differs(found, None, *words, name="norm.num_batches_tracked")
    assert found.tolerance == 0
    tied, untied = net().first, net().first
    assert kit.compare(nn.Sequential(tied, tied), nn.Sequential(tied, untied))


def test_the_prefix_of_ddp_is_ignored():
    state = net().state_dict()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in wrapped.items()}
    for one in (wrapped, compiled):
        assert kit.compare([one] * 2, state)
        assert kit.compare(state, one)
        assert kit.compare({"model": one, "step": 1}, {"model": state, "step": 1})
    wrapped["module.first.bias"] = wrapped["module.first.bias"] + 1
    assert kit.compare(wrapped, state).name == "first.bias"


def test_a_missing_and_an_unexpected_name():
    without = {name: tensor for name, tensor in RIGHT.items() if name != "bias"}
    found = kit.compare([RIGHT, without], RIGHT)
    assert_differs(found, "missing", "rank 1: 'bias' is missing", rank=1, name="bias")
    assert found.max_error == math.inf
    found = kit.compare([without, RIGHT], without)
    assert_differs(found, "unexpected", "rank 1: 'bias' is unexpected", rank=1)
    assert_differs(kit.compare([1.0, 2.0], {"x": 1.0}), "missing")


def test_shapes_and_types_that_differ():
    found = kit.compare({"x": torch.ones(2, 3)}, {"x": torch.ones(3, 2)})
    assert_differs(found, "shape", "'x' has the shape (2, 3) instead of (3, 2)", name="x")
    found = kit.compare([None, torch.ones(2)], torch.ones(2))
    assert_differs(found, "type", "is None instead of tensor([1., 1.])", rank=0)
    found = kit.compare({"x": "gloo"}, {"x": "nccl"})
    assert_differs(found, "value", "'x' is 'gloo' instead of 'nccl'")


def test_dtypes_that_differ_count_as_the_coarser():
    exact = random(100)
    rounded = exact.bfloat16()
    assert kit.compare(rounded, exact)
    assert "eps(bfloat16)" in str(kit.compare(2 * rounded, exact))
    assert kit.compare(exact, rounded)
    assert kit.compare(exact.double() + 1e-7, exact)
    assert not kit.compare(exact.double() + 1e-7, exact.double())
    assert kit.compare(torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))


def test_integers_and_booleans_are_exact():
    large = 2**62
    found = kit.compare(torch.tensor([large + 1]), torch.tensor([large]))
    assert_differs(found, None, "integers must be equal")
    assert kit.compare(torch.tensor([large]), torch.tensor([large], dtype=torch.int64))
    assert kit.compare(torch.tensor([3], dtype=torch.int32), torch.tensor([3]))
    assert_differs(kit.compare([torch.tensor([4, 8])] * N, torch.tensor([1, 2])), "summed")
    assert not kit.compare(torch.tensor([True]), torch.tensor([False]))
    assert kit.compare(10**400, 10**400)
    assert not kit.compare(10**400, 10**401)


def test_numbers_arrays_and_nested_values():
    assert kit.compare([1.0 + 1e-7, 1.0], 1.0)
    assert not kit.compare([1.0, 1.001], 1.0)
    assert kit.compare([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.0]).rank == 0
    assert kit.compare([1.0, 2.0], [1.0, 2.0]).rank is None
    assert_differs(kit.compare([1.0, 3.0], [1.0, 2.0]), None, "'[1]' differs", name="[1]")
    assert kit.compare(np.ones(3), torch.ones(3, dtype=torch.float64))
    assert kit.compare(np.float32(2), 2.0)
    assert kit.compare(1 + 2j, torch.tensor(1 + 2j))
    assert_differs(kit.compare(1 + 2j, 1 - 2j), None, "1+2j instead of 1-2j")
    nested = {"a": [torch.ones(2), {"b": 1.0}], 3: "text"}
    assert kit.compare(nested, nested)
    other = {"a": [torch.ones(2), {"b": 9.5}], 3: "text"}
    assert kit.compare(other, nested).name == "a[1].b"


def test_empty_sparse_scalar_and_large_tensors():
    assert kit.compare([torch.empty(0, 3)] * 2, torch.empty(0, 3))
    assert_differs(kit.compare(torch.empty(0), torch.empty(0, 3)), "shape")
    assert kit.compare(torch.eye(3).to_sparse(), torch.eye(3))
    assert kit.compare(torch.tensor(1e300), torch.tensor(1e300))
    assert kit.compare(torch.ones(3, requires_grad=True), torch.ones(3))
    assert kit.compare(torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3))


def test_results_of_ranks():
    result = ranks(*[RIGHT] * 3)
    found = kit.compare(result, RIGHT)
    assert found
    assert str(found) == "equal: 2 values on each of 3 ranks, without any difference."
    assert kit.compare(result, result)
    assert kit.compare(result, [RIGHT] * 3)
    assert kit.compare([RIGHT] * 3, result)
    assert kit.compare(ranks(1.0, 2.0), ranks(1.0, 3.0)).rank == 1


def test_optimizers_are_compared_by_their_state():
    def trained(rate):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        model(random(5, 3)).sum().backward()
        optimizer.step()
        return optimizer

    assert kit.compare(trained(0.1), trained(0.1))
    found = kit.compare(trained(0.1), trained(0.2))
    assert_differs(found, None, name="param_groups[0].lr")


# --- arguments, and the object -------------------------------------------------------------


def test_arrays_of_words_are_equal_or_not():
    assert kit.compare(np.array(["a", "b"]), np.array(["a", "b"]))
    assert not kit.compare(np.array(["a", "b"]), np.array(["a", "c"]))


ENDLESS: list = []
ENDLESS.append(ENDLESS)


class Sharded(torch.Tensor):
    def full_tensor(self):
        raise AssertionError("it communicates")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((1.0, 1.0), {"rtol": -1}, "rtol must be a number of at least 0, got -1"),
        ((1.0, 1.0), {"rtol": "1"}, "rtol must be a number of at least 0, got '1'"),
        ((1.0, 1.0), {"terms": 0}, "terms must be a whole number of at least 1, got 0"),
        ((1.0, 1.0), {"terms": 2, "atol": 1}, "terms has no effect with rtol or atol"),
        (([], 1.0), {}, "mine is an empty list"),
        (({}, {}), {}, "there is nothing to compare"),
        ((1.0, ranks(1.0, 2.0)), {}, "reference has values of 2 ranks, and mine must have as many"),
        ((ranks(1.0), ranks(1.0, 2.0)), {}, "reference has values of 2 ranks"),
        (({"w": torch.ones(2).as_subclass(Sharded)}, {"w": torch.ones(2)}), {}, "'w' is a DTensor"),
        ((torch.empty(2, device="meta"), torch.ones(2)), {}, "the value has no numbers to compare"),
        ((ENDLESS, ENDLESS), {}, "a list or dict that contains itself cannot be compared"),
    ],
)
def test_arguments_that_make_no_sense(arguments, options, message):
    with pytest.raises(kit.CompareError, match=message) as caught:
        kit.compare(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_check_raises_what_str_says_also_after_a_rank_has_returned_it():
    kit.compare(1.0, 1.0).check()
    found = kit.compare([1.0, 2.0], 1.0)
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(kit.ProofError) as caught:
        found.check()
    assert str(caught.value) == str(found) == repr(found)


def test_nothing_that_was_passed_is_changed():
    mine, reference = [random(3), random(3)], random(3, seed=1)
    before = pickle.dumps((mine, reference))
    kit.compare(mine, reference)
    assert pickle.dumps((mine, reference)) == before


# --- real ranks ----------------------------------------------------------------------------

BATCH = 32


def small(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))


def batch():
    return random(BATCH, 10, seed=3), random(BATCH, 8, seed=4)


def train(model, steps, x, y):
    """Train, and return gradients, parameters and the optimizer's state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    return {"gradients": gradients, "model": model.state_dict(), "optimizer": states}


def with_ddp(rank, world_size, steps):
    mine = [tensor.chunk(world_size)[rank] for tensor in batch()]
    return train(DistributedDataParallel(small()), steps, *mine)


def test_ddp_on_four_ranks_trains_the_model_of_one_process():
    found = kit.compare(kit.run(with_ddp, 20, backend="gloo"), train(small(), 20, *batch()))
    assert found, found
    assert 0 < found.max_error < found.tolerance


def test_a_dtensor_is_refused_where_it_lies_and_gathered_is_right():
    def compare(rank, world_size):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (world_size,))
        whole = random(8, 4)
        spread = distribute_tensor(whole, mesh, [Shard(0)])
        try:
            kit.compare({"weight": spread}, {"weight": whole})
        except kit.CompareError as error:
            return str(error), kit.compare(spread.full_tensor(), whole).equal

    for text, equal in kit.run(compare, world_size=2, backend="gloo"):
        assert text.startswith("'weight' is a DTensor, of which each rank has a shard")
        assert equal
