"""The calls that templates are filled with. A new call is a new row here, and nothing else.

Every call is made by all ranks, with tensors of 4 numbers for each rank. Rank 0 is the root of
those that have one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A collective: the call itself, and lines that create what it needs."""

    name: str
    call: str
    setup: str

    @property
    def fields(self) -> dict[str, str]:
        """The fields of templates.

        $typed and $sized are $setup with `dtype` and `count`, which the template sets first; $root
        is the call with `root` as its root; $in_group is the call in `group`, and $in_pair the same
        with the rank `first` as root.
        """
        arguments = re.compile(r"torch\.(ones|zeros)\(([^()]*)\)")
        return {
            "name": self.name,
            "call": self.call,
            "setup": self.setup,
            "typed": arguments.sub(r"torch.\1(\2, dtype=dtype)", self.setup),
            "sized": re.sub(r"\b4\b", "count", self.setup),
            "root": re.sub(r"(src|dst)=0", r"\1=root", self.call).replace("== 0", "== root"),
            "async_": self._with("async_op=True"),
            "in_group": self._with("group=group"),
            "async_in_group": self._with("group=group, async_op=True"),
            "in_pair": _first_is_root(self._with("group=group")),
            "as_max": self._with("op=dist.ReduceOp.MAX"),
            "with_op": self._with("op=op"),
        }

    def _with(self, argument: str) -> str:
        return f"{self.call[:-1]}{'' if self.call.endswith('()') else ', '}{argument})"


def _first_is_root(call: str) -> str:
    return re.sub(r"(src|dst)=0", r"\1=first", call).replace("rank == 0", "rank == first")


ONE = "tensor = torch.ones(4)"
PARTS = f"{ONE}\nparts = [torch.ones(4) for _ in range(world_size)]"
WHOLE = f"{ONE}\nwhole = torch.ones(4 * world_size)"
TO_ALL = """\
sent = [torch.ones(4) for _ in range(world_size)]
parts = [torch.zeros(4) for _ in range(world_size)]"""
SINGLE = "sent, whole = torch.ones(4 * world_size), torch.zeros(4 * world_size)"
OBJECTS = "objects = [rank] * world_size"

REDUCING = [
    Call("all_reduce", "dist.all_reduce(tensor)", ONE),
    Call("reduce_scatter", "dist.reduce_scatter(tensor, parts)", PARTS),
    Call("reduce_scatter_tensor", "dist.reduce_scatter_tensor(tensor, whole)", WHOLE),
]
GATHERING = [
    Call("all_gather", "dist.all_gather(parts, tensor)", PARTS),
    Call("all_gather_into_tensor", "dist.all_gather_into_tensor(whole, tensor)", WHOLE),
    Call("all_to_all", "dist.all_to_all(parts, sent)", TO_ALL),
    Call("all_to_all_single", "dist.all_to_all_single(whole, sent)", SINGLE),
]
REDUCE = Call("reduce", "dist.reduce(tensor, dst=0)", ONE)
ROOTED = [
    Call("broadcast", "dist.broadcast(tensor, src=0)", ONE),
    REDUCE,
    Call("gather", "dist.gather(tensor, parts if rank == 0 else None, dst=0)", PARTS),
    Call("scatter", "dist.scatter(tensor, parts if rank == 0 else None, src=0)", PARTS),
]
BARRIER = Call("barrier", "dist.barrier()", "# no tensors")
ROOTED_OBJECT = [
    Call("broadcast_object_list", "dist.broadcast_object_list(objects, src=0)", OBJECTS),
    Call(
        "gather_object",
        "dist.gather_object(rank, objects if rank == 0 else None, dst=0)",
        OBJECTS,
    ),
    Call(
        "scatter_object_list",
        "dist.scatter_object_list(mine, objects if rank == 0 else None, src=0)",
        f"mine = [None]\n{OBJECTS}",
    ),
]
OBJECT = [
    Call("all_gather_object", "dist.all_gather_object(objects, rank)", OBJECTS),
    *ROOTED_OBJECT,
]
UNROOTED = [*REDUCING, *GATHERING, BARRIER]
WITH_TENSORS = [*REDUCING, *GATHERING, *ROOTED]
COLLECTIVES = [*WITH_TENSORS, BARRIER]
ALL = [*COLLECTIVES, *OBJECT]


@dataclass(frozen=True)
class Form:
    """One way to send and receive a tensor and to wait for it: $send and $recv take `peer`."""

    name: str
    send: str
    recv: str

    @property
    def fields(self) -> dict[str, str]:
        """The fields of templates. $tagged_send and $tagged_recv also take `tag`."""
        fields = {"name": self.name}
        for name, text in (("send", self.send), ("recv", self.recv)):
            fields[name] = text.replace("MORE", "")
            fields[f"tagged_{name}"] = text.replace("MORE", ", tag=tag")
            fields[f"{name}_in_group"] = text.replace("MORE", ", group=group")
        return fields


def _batch(function: str) -> str:
    return f"dist.batch_isend_irecv([dist.P2POp(dist.{function}, tensor, peerMORE)])[0].wait()"


FORMS = [
    Form("send_recv", "dist.send(tensor, peerMORE)", "dist.recv(tensor, peerMORE)"),
    Form(
        "isend_irecv",
        "dist.isend(tensor, peerMORE).wait()",
        "dist.irecv(tensor, peerMORE).wait()",
    ),
    Form("batch_isend_irecv", _batch("isend"), _batch("irecv")),
]
