"""A script on host 0 that calls `kit.torchrun`, and what its printed command starts on host 1."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hosts import Host
from processes import wait_until

START = 300  # seconds; every process imports PyTorch, and the machine may have other work
END = 300

# `told` is what the script prints in the end; `note` writes a file with the time in it, which is
# the same on both hosts.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import ddp_kit as kit
from ddp_kit import settings

FOLDER = {folder!r}

def note(name):
    part = Path(FOLDER, "." + name)
    part.write_text(str(time.monotonic()))
    part.rename(Path(FOLDER, name))

{worker}

if __name__ == "__main__":
    options = dict(nproc_per_node={per_host}, nnodes=2, master_addr={address!r}, join_timeout=300)
    {before}
    told = {{"error": None}}
    try:
        result = kit.torchrun(worker, **options)
        told |= {{"values": list(result), "messages": len(result.trace.messages())}}
    except kit.KitError as error:
        told |= {{"error": type(error).__name__, "text": str(error)}}
        told["returned"] = list(getattr(error, "returned", ()))
        waits = [(w.rank, w.op, w.where and w.where.source) for w in getattr(error, "waits", ())]
        told["waits"] = waits
    told["moment"] = time.monotonic()
    print("TOLD", json.dumps(told))
"""


class Notebook:
    """One run of `worker`, source code that defines it, on `per_host` ranks of each host.

    folder: an empty one, where the worker's `note` writes. before: a statement of the script.
    options: torchrun's on host 1, besides those of the printed command.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        worker: str,
        before: str = "",
        per_host: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        self.hosts, self.notes, self._folder = hosts, folder / "notes", folder
        self.notes.mkdir()
        script, self._out, self._err = folder / "script.py", folder / "out", folder / "err"
        text = SCRIPT.format(
            folder=str(self.notes),
            worker=textwrap.dedent(worker),
            before=before or "pass",
            per_host=per_host,
            address=hosts[0].address,
        )
        script.write_text(text)
        self.script = hosts[0].start([sys.executable, str(script)], self._out, self._err)
        wait_until(lambda: "  torchrun " in self.printed(), START, "the command is printed")
        (command,) = (line for line in self.printed().splitlines() if line.startswith("  torchrun"))
        words = [sys.executable, "-m", "torch.distributed.run", *options, *shlex.split(command)[1:]]
        self.agent = hosts[1].start(words, folder / "out-1", folder / "err-1")

    def printed(self) -> str:
        """Return what the script has printed."""
        return self._out.read_text()

    def wait_for(self, *notes: str) -> None:
        """Wait until the worker has written these notes."""
        wait_until(lambda: all((self.notes / n).exists() for n in notes), START, str(notes))

    def told(self, seconds: float = START) -> dict:
        """Wait for the script's end; return what it has told."""
        self.script.wait(seconds)
        lines = [line for line in self.printed().splitlines() if line.startswith("TOLD ")]
        assert lines, self._err.read_text()
        return json.loads(lines[-1].removeprefix("TOLD "))

    def since(self, told: dict, *notes: str) -> float:
        """Return how many seconds passed from the last of these notes until the script was told."""
        return told["moment"] - max(float((self.notes / note).read_text()) for note in notes)

    def assert_nothing_is_left(self) -> None:
        """Wait until nothing runs on either host, and look for files that are left."""
        wait_until(lambda: not [*self.hosts[0].processes(), *self.hosts[1].processes()], END, "end")
        assert not list(self._folder.glob("*_for_port_*"))
