"""A matrix on ranks before and after a redistribute, drawn, with controls for all choices."""

from __future__ import annotations

from collections import Counter

from torch.distributed.tensor import Partial, Placement, Shard

from ddp_kit.errors import PoolError
from ddp_kit.lessons._placements import (
    PLACEMENTS,
    by_dtensor,
    collectives,
    redistribute_on_mesh,
    whole_on_mesh,
)
from ddp_kit.notebook.controls import Explorer


def explore(
    before: str = "Shard(0)",
    after: str = "Replicate()",
    world_size: int = 4,
    rows: int = 4,
    columns: int = 4,
    dp: int = 1,
    before_dp: str = "Replicate()",
    after_dp: str = "Replicate()",
) -> Explorer:
    """Redistribute a matrix, and draw which rank holds which part of it, before and after.

    before, after: placements, as in "Shard(0)". dp: 1, or 2 for a mesh of two dimensions, dp and
    tp. Then `before` and `after` are along tp, `before_dp` and `after_dp` along dp. In JupyterLab,
    controls follow. Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    names = tuple(PLACEMENTS)
    chosen = {"before": before, "after": after, "world_size": world_size}
    chosen |= {"rows": rows, "columns": columns}
    chosen |= {"dp": dp, "before_dp": before_dp, "after_dp": after_dp}

    def choices(settings: dict) -> dict:
        several = range(1, 9)
        kinds = {"before": names, "after": names[:-1], "world_size": several}
        kinds |= {"rows": several, "columns": several}
        dps = range(1, 2 if settings["world_size"] % 2 else 3)
        return kinds | {"dp": dps, "before_dp": names, "after_dp": names[:-1]}

    def placed(settings: dict, when: str) -> list[Placement]:
        used = [when] if settings["dp"] == 1 else [f"{when}_dp", when]
        return [PLACEMENTS[settings[name]] for name in used]

    def ask(settings: dict) -> tuple:
        shape = settings["rows"], settings["columns"]
        kinds = [placed(settings, when) for when in ("before", "after")]
        if settings["dp"] == 1:
            return by_dtensor, *kinds[0], *kinds[1], *shape
        if {type(kind) for kind in kinds[0]} == {Partial, Shard}:
            raise PoolError(
                "before and before_dp must not be Partial() and Shard(), because a piece of a "
                f"summand cannot be drawn, got {format_placements(kinds[0])}"
            )
        return redistribute_on_mesh, mesh_of(settings), *kinds, *shape

    def draw(result, settings: dict):
        mesh, start = mesh_of(settings), placed(settings, "before")
        whole = whole_on_mesh(mesh, start, settings["rows"], settings["columns"])
        nbytes = sum(row.sent for row in result.trace.summary(rank=0).rows)
        called = collectives(result.trace)
        sent = f"{format_calls(called)}, {nbytes:,} bytes sent by rank 0"
        moments = {when: format_placements(placed(settings, when)) for when in result[0]}
        if len(mesh) == 1:
            title = f"{moments['before']} to {moments['after']}: {sent}"
            return plot.placements(result, whole, title=title)
        held = [{f"{when}: {moments[when]}": rank[when] for when in moments} for rank in result]
        title = f"{mesh[0]} x {mesh[1]} ranks: {sent.replace('redistribute ', '')}"
        return plot.placements(held, whole, mesh, ("dp", "tp"), title)

    return Explorer(
        "device_mesh",
        chosen,
        choices,
        ask=ask,
        draw=draw,
        idle=lambda settings: {"before_dp", "after_dp"} if settings["dp"] == 1 else set(),
    )


def mesh_of(settings: dict) -> tuple[int, ...]:
    """Return the shape of the mesh that `explore` should have."""
    n, dp = settings["world_size"], settings["dp"]
    return (n,) if dp == 1 else (dp, n // dp)


def format_placements(kinds: list[Placement]) -> str:
    """Return placements as a learner writes them: "Shard(0)", or a list for several."""
    names = {placement: name for name, placement in PLACEMENTS.items()}
    text = ", ".join(names[placement] for placement in kinds)
    return text if len(kinds) == 1 else f"[{text}]"


def format_calls(called: list[str]) -> str:
    """Return the names of calls, each once: "2 x all_reduce"."""
    times = Counter(called)
    names = [name if many == 1 else f"{many} x {name}" for name, many in times.items()]
    return ", ".join(names or ["nothing is sent"])
