"""The four files of the full MNIST: whether a file is one of them, and their download.

`torchvision.datasets.MNIST(download=True)` does not serve ranks: all would download at once, into
the same files, and read what others have half written. Here one downloads and the others wait, a
file appears when it is whole, every wait has a limit, and an error is one sentence.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ddp_kit.errors import DataError
from ddp_kit.trace.rank import progress, recorder

# The four files of the full MNIST, and the SHA-256 of each when it is not compressed: a file that
# somebody has compressed again is as good.
FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SIZE = 11_594_722  # bytes of the four files as they are downloaded
SILENCE, LONGEST = 30, 600  # seconds: without a byte of a download, and for one file


def original(data: bytes, name: str) -> bytes | None:
    """Return the content of a file, without compression; None if it is not MNIST's."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return None
    return data if hashlib.sha256(data).hexdigest() == FILES[name] else None


def download(files: list[str], folder: Path) -> None:
    """Download these files into a folder, each in one step: nobody finds half of one.

    Ranks and processes that need the same files wait for the one that downloads them. Raises
    DataError if no mirror has the originals, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock, _progress() as count:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            for file in files:
                if not (folder / file).is_file():  # another process had the lock first
                    part = folder / f".{file}.part"
                    try:
                        part.write_bytes(_fetch(file, count))
                        part.replace(folder / file)
                    finally:
                        part.unlink(missing_ok=True)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"the full MNIST could not be downloaded ({reason}); copy {', '.join(files)} from "
            f"{MIRRORS[0]} into {folder}, or pass folder= the folder that has them, or use "
            "kit.mnist(), which needs no network"
        ) from None


def _fetch(file: str, count: Callable[[int], None]) -> bytes:
    """Return a file from the first mirror that has the original; raise what the last one raised."""
    failure: Exception = OSError("there is no mirror")
    for mirror in MIRRORS:
        try:
            data, limit = bytearray(), time.monotonic() + LONGEST
            with urllib.request.urlopen(mirror + file, timeout=SILENCE) as answer:
                while chunk := answer.read1(65536):  # read would wait until it has them all
                    data += chunk
                    count(len(chunk))
                    if time.monotonic() > limit:
                        raise TimeoutError(f"{file} took more than {LONGEST} s")
            if original(bytes(data), file.removesuffix(".gz")) is not None:
                return bytes(data)
            failure = OSError(f"{mirror}{file} is not the file of MNIST, or not all of it")
        except (OSError, http.client.HTTPException) as error:
            failure = error
    raise failure


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show how much has arrived; yield what counts it.

    A rank shows it in the live view, other processes on stderr in a notebook or a terminal.
    """
    rank = recorder.current if progress.is_live else None
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    visible = in_notebook or sys.stderr.isatty()
    done = shown = 0

    def count(nbytes: int) -> None:
        nonlocal done, shown
        done += nbytes
        percent = min(100, 100 * done // SIZE)
        if percent <= shown:
            return
        shown = percent
        if rank is not None:
            rank.show_progress(percent, 100, f"downloading MNIST: percent of {SIZE / 1e6:.1f} MB")
        elif visible:
            bar = "#" * (percent // 4)
            text = f"\rDownloading MNIST: [{bar:25}] {percent:3} % of {SIZE / 1e6:.1f} MB"
            print(text, end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if rank is not None:
            rank.show_progress(None, None)
        elif visible and shown:
            print(file=sys.stderr)
