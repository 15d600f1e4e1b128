"""What PyTorch means by its words when ranks do not find each other."""

from __future__ import annotations

from ddp_kit.errors import RankError
from ddp_kit.failures import name_ranks

ALL_COME = "Start every rank, each with a number of its own, all with the same world size."


# What stands in PyTorch's message, what it means, and what to do.
MEANINGS = {
    "expected, but not set": (
        "env:// reads a variable that is not there.",
        "Start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank.",
    ),
    "clients joined": ("it keeps the store, and not all ranks came to it in time.", ALL_COME),
    "Wait timeout": ("it waited in the file for a rank that wrote nothing there.", ALL_COME),
    "wait timeout": ("it waited in the store for a rank that wrote nothing there.", ALL_COME),
    "EADDRINUSE": (
        "it must listen on a port that another process has.",
        "Take a free port. Only one rank may be rank 0.",
    ),
    "to connect to": (
        "nobody listens at the address it was given.",
        "Start rank 0. MASTER_ADDR and MASTER_PORT, or the URL, must name its machine and port.",
    ),
    "onnect": (  # "Connection refused" or "Connect timeout": whichever of two ranks has to call
        "it found the address of a rank, and cannot reach it there.",
        "The address may be that of an earlier run: remove the file, or take a new name each time.",
    ),
    "operation to complete": (
        "it is in a group, and waited in vain for another rank to take part.",
        ALL_COME,
    ),
}


CONSEQUENCES = ("Connection reset", "Connection closed", "Broken pipe")  # of another's failure


def explain(error: Exception) -> str:
    """Say what PyTorch meant, in words that are the same on every run.

    A RankError is told rank by rank; a rank that failed because another one had left is passed
    over. Of any other error the meaning alone is told.
    """
    if not isinstance(error, RankError):
        return _meaning(type(error).__name__, str(error))
    followed = {
        rank
        for rank, failure in error.failures.items()
        if any(words in failure.message for words in CONSEQUENCES)
    }
    told: dict[str, list[int]] = {}
    for rank in error.failures.keys() - followed or followed:
        failure = error.failures[rank]
        told.setdefault(_meaning(failure.type, failure.message), []).append(rank)
    return "\n".join(
        f"{name_ranks(ranks)}: {meaning}"
        for meaning, ranks in sorted(told.items(), key=lambda item: min(item[1]))
    )


def _meaning(kind: str, message: str) -> str:
    for words, (meaning, hint) in MEANINGS.items():
        if words in message:
            return f"{meaning}\n    {hint}"
    return f"{kind}, for which this lesson has no words; read its message."
