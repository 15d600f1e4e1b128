"""The calls that templates are filled with. A new call is a new row here, and nothing else.

Every call is made by all ranks, with tensors of 4 numbers for each rank. Rank 0 is the root of
those that have one.
"""

from __future__ import annotations

import re

Row = dict[str, str]  # what a template uses as $name, $call, ...


def call(name: str, text: str, setup: str) -> Row:
    """Return the row of a collective. setup: lines that create what it needs.

    $typed and $sized are $setup with `dtype` and `count`, which the template sets first; $root is
    the call with `root` as its root; $in_group is the call in `group`, and $in_pair the same with
    the rank `first` as root.
    """

    def with_argument(argument: str) -> str:
        return f"{text[:-1]}{'' if text.endswith('()') else ', '}{argument})"

    def with_root(text: str, root: str) -> str:
        return re.sub(r"(src|dst)=0", rf"\1={root}", text).replace("rank == 0", f"rank == {root}")

    return {
        "name": name,
        "call": text,
        "setup": setup,
        "typed": re.sub(r"torch\.(ones|zeros)\(([^()]*)\)", r"torch.\1(\2, dtype=dtype)", setup),
        "sized": re.sub(r"\b4\b", "count", setup),
        "root": with_root(text, "root"),
        "async_": with_argument("async_op=True"),
        "in_group": with_argument("group=group"),
        "async_in_group": with_argument("group=group, async_op=True"),
        "in_pair": with_root(with_argument("group=group"), "first"),
        "as_max": with_argument("op=dist.ReduceOp.MAX"),
        "with_op": with_argument("op=op"),
    }


ONE = "tensor = torch.ones(4)"
PARTS = f"{ONE}\nparts = [torch.ones(4) for _ in range(world_size)]"
WHOLE = f"{ONE}\nwhole = torch.ones(4 * world_size)"
TO_ALL = """\
sent = [torch.ones(4) for _ in range(world_size)]
parts = [torch.zeros(4) for _ in range(world_size)]"""
SINGLE = "sent, whole = torch.ones(4 * world_size), torch.zeros(4 * world_size)"
OBJECTS = "objects = [rank] * world_size"
IF_ROOT = "if rank == 0 else None"

REDUCING = [
    call("all_reduce", "dist.all_reduce(tensor)", ONE),
    call("reduce_scatter", "dist.reduce_scatter(tensor, parts)", PARTS),
    call("reduce_scatter_tensor", "dist.reduce_scatter_tensor(tensor, whole)", WHOLE),
]
GATHERING = [
    call("all_gather", "dist.all_gather(parts, tensor)", PARTS),
    call("all_gather_into_tensor", "dist.all_gather_into_tensor(whole, tensor)", WHOLE),
    call("all_to_all", "dist.all_to_all(parts, sent)", TO_ALL),
    call("all_to_all_single", "dist.all_to_all_single(whole, sent)", SINGLE),
]
REDUCE = call("reduce", "dist.reduce(tensor, dst=0)", ONE)
ROOTED = [
    call("broadcast", "dist.broadcast(tensor, src=0)", ONE),
    REDUCE,
    call("gather", f"dist.gather(tensor, parts {IF_ROOT}, dst=0)", PARTS),
    call("scatter", f"dist.scatter(tensor, parts {IF_ROOT}, src=0)", PARTS),
]
BARRIER = call("barrier", "dist.barrier()", "# no tensors")
ROOTED_OBJECT = [
    call("broadcast_object_list", "dist.broadcast_object_list(objects, src=0)", OBJECTS),
    call("gather_object", f"dist.gather_object(rank, objects {IF_ROOT}, dst=0)", OBJECTS),
    call(
        "scatter_object_list",
        f"dist.scatter_object_list(mine, objects {IF_ROOT}, src=0)",
        f"mine = [None]\n{OBJECTS}",
    ),
]
OBJECT = [
    call("all_gather_object", "dist.all_gather_object(objects, rank)", OBJECTS),
    *ROOTED_OBJECT,
]
UNROOTED = [*REDUCING, *GATHERING, BARRIER]
WITH_TENSORS = [*REDUCING, *GATHERING, *ROOTED]
COLLECTIVES = [*WITH_TENSORS, BARRIER]
ALL = [*COLLECTIVES, *OBJECT]
PAIRS = [
    {**one, **{f"other_{field}": text for field, text in other.items()}}
    for one, other in zip(ALL, [*ALL[1:], ALL[0]], strict=True)
]


def form(name: str, send: str, receive: str) -> Row:
    """Return one way to send and receive a tensor and to wait for it.

    $send and $recv take `peer`, $tagged_send and $tagged_recv also take `tag`, $send_in_group and
    $recv_in_group take `group`.
    """
    row = {"name": name}
    for kind, text in (("send", send), ("recv", receive)):
        row[kind] = text.replace("MORE", "")
        row[f"tagged_{kind}"] = text.replace("MORE", ", tag=tag")
        row[f"{kind}_in_group"] = text.replace("MORE", ", group=group")
    return row


BATCH = "dist.batch_isend_irecv([dist.P2POp(dist.{}, tensor, peerMORE)])[0].wait()"
FORMS = [
    form("send_recv", "dist.send(tensor, peerMORE)", "dist.recv(tensor, peerMORE)"),
    form(
        "isend_irecv",
        "dist.isend(tensor, peerMORE).wait()",
        "dist.irecv(tensor, peerMORE).wait()",
    ),
    form("batch_isend_irecv", BATCH.format("isend"), BATCH.format("irecv")),
]
