"""The calls that templates are filled with. A new call is a new row here, and nothing else.

Every call is made by all ranks, with tensors of 4 numbers. Rank 0 is the root of those that have
one.
"""

from __future__ import annotations

from program import Call

ONE = "tensor = torch.ones(4)"
PARTS = f"{ONE}\nparts = [torch.ones(4) for _ in range(world_size)]"
WHOLE = f"{ONE}\nwhole = torch.ones(4 * world_size)"
TO_ALL = """\
sent = [torch.ones(4) for _ in range(world_size)]
parts = [torch.zeros(4) for _ in range(world_size)]"""
SINGLE = "sent, whole = torch.ones(4 * world_size), torch.zeros(4 * world_size)"
OBJECTS = "objects = [None] * world_size"

UNROOTED = [
    Call("all_reduce", "dist.all_reduce(tensor)", ONE),
    Call("all_gather", "dist.all_gather(parts, tensor)", PARTS),
    Call("all_gather_into_tensor", "dist.all_gather_into_tensor(whole, tensor)", WHOLE),
    Call("reduce_scatter", "dist.reduce_scatter(tensor, parts)", PARTS),
    Call("reduce_scatter_tensor", "dist.reduce_scatter_tensor(tensor, whole)", WHOLE),
    Call("all_to_all", "dist.all_to_all(parts, sent)", TO_ALL),
    Call("all_to_all_single", "dist.all_to_all_single(whole, sent)", SINGLE),
    Call("barrier", "dist.barrier()", "pass"),
]
ROOTED = [
    Call("broadcast", "dist.broadcast(tensor, src=0)", ONE),
    Call("reduce", "dist.reduce(tensor, dst=0)", ONE),
    Call("gather", "dist.gather(tensor, parts if rank == 0 else None, dst=0)", PARTS),
    Call("scatter", "dist.scatter(tensor, parts if rank == 0 else None, src=0)", PARTS),
]
OBJECT = [
    Call("all_gather_object", "dist.all_gather_object(objects, rank)", OBJECTS),
    Call("broadcast_object_list", "dist.broadcast_object_list(objects, src=0)", OBJECTS),
    Call(
        "gather_object",
        "dist.gather_object(rank, objects if rank == 0 else None, dst=0)",
        OBJECTS,
    ),
    Call(
        "scatter_object_list",
        "dist.scatter_object_list([None], objects if rank == 0 else None, src=0)",
        OBJECTS,
    ),
]
WITH_TENSORS = [call for call in [*UNROOTED, *ROOTED] if call.name != "barrier"]
COLLECTIVES = [*UNROOTED, *ROOTED]
