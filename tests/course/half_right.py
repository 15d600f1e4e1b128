"""Answers that are right in part: a change of the solution, and how many parts of it hold."""

from __future__ import annotations

_TREE = """    while distance < world_size:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            dist.recv(arriving, rank + distance)
            tensor += arriving
        distance *= 2"""
_ONE_BY_ONE = """    if rank > 0:
        dist.send(tensor, 0)
    for src in range(1, world_size if rank == 0 else 0):
        dist.recv(arriving, src)
        tensor += arriving"""

# exercise: (what the solution has, what is there instead, parts that hold)
ANSWERS: dict[str, tuple[str, str, int]] = {
    "exercise_1_1": ("elif rank == receiver:", "else:", 1),  # deadlocks on three ranks
    "exercise_1_4": ("range(1, world_size)", "[1]", 1),
    "exercise_2_1": ("dist.recv(tensor, src)", "dist.recv(tensor, 0)", 1),
    "exercise_2_2": (_TREE, _ONE_BY_ONE, 3),
    "exercise_2_9": ("have *= 2", "have += min(have, 2)", 2),  # a record, in four rounds
    "exercise_3_1": (
        "dist.all_reduce(total)",
        "dist.all_reduce(total), dist.all_reduce(total.clone())",
        2,
    ),
    "exercise_3_3": (  # a hunt, repaired for two ranks only
        "dist.broadcast(layer.weight.detach(), src=0)",
        "world_size == 2 and dist.broadcast(layer.weight.detach(), src=0)",
        1,
    ),
    "exercise_3_4": (  # a whole function
        "dist.all_reduce(sums)",
        "dist.all_reduce(sums), dist.all_reduce(sums.clone())",
        2,
    ),
    "exercise_4_1": ("zeros_like(mine)", "zeros_like(pieces[0])", 1),
    "exercise_5_1": ('environ.get("LOCAL_RANK", 0)', 'environ["LOCAL_RANK"]', 2),
    "exercise_6_1": ("sum(sizes[: names.index(host)])", "names.index(host) * sizes[0]", 1),
    "exercise_6_2": ('f"{name}/all"', '"all"', 2),
    "exercise_8_3": ("nullcontext() if last else model.no_sync()", "nullcontext()", 2),
    "exercise_10_3": ("bfloat16", "float16", 1),
    "exercise_11_1": (' if gpus else "cpu"', "", 1),
    "exercise_12_1": ("halving += 2", "halving += 3", 1),
    "exercise_12_2": ("if step >= warmup:", "if True:", 1),
    "exercise_12_3": ("return None", "return 0", 1),
    "exercise_12_4": (" + 12 * layers * width * length", "", 1),
    "exercise_14_1": (
        "squares, group",
        "squares.clone(), group=mesh.get_group('dp')), dist.all_reduce(squares, group",
        2,
    ),
    "exercise_15_1": (
        "dist.broadcast(parameter.data, src=owner)",
        "[dist.broadcast(parameter.data, src=owner) for _ in (1, 2)]",
        2,
    ),
    "exercise_15_2": (
        "reduce_scatter_single(mine, whole)",
        "dist.all_reduce(whole); mine = whole.chunk(n)[rank]",
        2,
    ),
    "exercise_15_3": (
        "average(grad_y.T @ x)",
        "[average(grad_y.T @ x) for _ in range(3)][0]",
        2,
    ),
    "exercise_15_4": ("gradient + 2 * parameter", "gradient + parameter", 1),
    "exercise_17_1": ("min(p - 1 - rank, m)", "p - 1 - rank", 1),
    "exercise_17_3": ("> most", ">= most", 1),
    "exercise_20_1": ('mesh.get_group("tp")', "None", 1),
    "exercise_20_4": (" + 12 * layers * width * context", "", 1),
    "exercise_21_1": ("flags[rank - distance]", "min(flags)", 3),
}


def changed(exercise: str, solution: str) -> str:
    """Return the solution's cell with the change for this exercise."""
    right, wrong, _ = ANSWERS[exercise]
    assert right in solution, exercise
    return solution.replace(right, wrong)
