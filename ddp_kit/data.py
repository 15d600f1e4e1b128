"""MNIST with and without a network, and torchvision with a PyTorch that it was not built for.

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
import importlib.util
import os
import struct
import sys
import time
import urllib.request
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_kit.errors import DataError

if TYPE_CHECKING:
    import torch
    from torchvision.datasets import MNIST

DIGITS = Path(__file__).parent / "lessons" / "data" / "digits"
PLACES = ("", "raw", "MNIST/raw")  # below a folder; torchvision uses the last
MEAN, DEVIATION = 0.1307, 0.3081  # of the training images, scaled to 0 to 1 and rounded
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
SIZE = "11.6 MB"  # of the four files as they are downloaded
SILENCE, LONGEST = 30, 600  # seconds: without a byte of a download, and for one file


def mnist(
    train: bool = True, full: bool = False, folder: str | os.PathLike[str] | None = None
) -> MNIST:
    """Return MNIST's handwritten digits as a torchvision dataset, normalised as in the tutorial.

    train: return the training digits, else the test digits.
    full: use all 70,000 digits, else the first 10,000 training and 2,000 test digits, which are
        part of the package.
    folder: where the four files of the full MNIST are, compressed or not; by default the folder in
        the environment variable DDP_KIT_MNIST. Without either they are downloaded once, into the
        user's cache.

    Each item is (image, label): a float32 tensor of shape (1, 28, 28), and an int from 0 to 9.
    Raises DataError if a file is missing, damaged or cannot be downloaded, or for a wrong argument.
    Source: MNIST by Y. LeCun and C. Cortes, CC BY-SA 3.0.
    """
    if folder is not None and not full:
        raise DataError(f"folder={str(folder)!r} is for the full MNIST; pass full=True, too")
    part = "train" if train else "t10k"
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    if full:
        images, labels = _full(names, folder)
    else:
        packed = [(DIGITS / f"{name}.gz").read_bytes() for name in names]
        images, labels = (_decode(gzip.decompress(each)) for each in packed)
    from torchvision import datasets, transforms

    # Its own __init__ needs a folder with raw files.
    dataset = datasets.MNIST.__new__(datasets.MNIST)
    normalise = transforms.Normalize((MEAN,), (DEVIATION,))
    transform = transforms.Compose([transforms.ToTensor(), normalise])
    datasets.VisionDataset.__init__(dataset, root="ddp_kit", transform=transform)
    dataset.train, dataset.data, dataset.targets = train, images, labels.long()
    return dataset


def _full(
    names: tuple[str, str], folder: str | os.PathLike[str] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two of the four files as tensors; download all four if there is no folder."""
    own = os.environ.get("DDP_KIT_MNIST") if folder is None else folder
    if own:
        place = Path(own).expanduser()
    else:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddp_kit")
    found = {name: _find(place, name) for name in FILES}
    missing = [name for name in FILES if found[name] is None and (name in names or not own)]
    if missing and own:
        raise DataError(
            f"{place} lacks {' and '.join(missing)}, compressed or not; "
            f"kit.mnist looks there and in {' and '.join(PLACES[1:])} below it"
        )
    if missing:
        download([f"{name}.gz" for name in missing], place / PLACES[-1])
        found = {name: _find(place, name) for name in FILES}
    advice = "replace it" if own else "delete it, and the next call downloads it"
    images, labels = (_read(found[name], name, advice) for name in names)
    return images, labels


def _find(folder: Path, name: str) -> Path | None:
    """Return the file of this name, compressed or not, in one of the usual places; else None."""
    for place in PLACES:
        for path in (folder / place / name, folder / place / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def _read(path: Path, name: str, advice: str) -> torch.Tensor:
    """Return the values of one of the four files; raise DataError if it is not the original."""
    try:
        data = original(path.read_bytes(), name)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if data is None:
        raise DataError(f"{path} is damaged or not the file of MNIST; {advice}")
    return _decode(data)


def _decode(data: bytes) -> torch.Tensor:
    """Return the values of an IDX file of bytes as a uint8 tensor.

    The format: two zero bytes, the type (8 for bytes), the number of dimensions, each
    dimension as a big-endian int32, then the data.
    """
    import torch

    dimensions = data[3]
    shape = struct.unpack_from(f">{dimensions}i", data, 4)
    body = bytearray(memoryview(data)[4 + 4 * dimensions :])
    return torch.frombuffer(body, dtype=torch.uint8).reshape(shape)


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
        with open(folder / ".lock", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            for file in files:
                if not (folder / file).is_file():  # another process had the lock first
                    print(f"downloading {file}, of {SIZE} in all", file=sys.stderr)
                    part = folder / f".{file}.part"
                    try:
                        part.write_bytes(_fetch(file))
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


def _fetch(file: str) -> bytes:
    """Return a file from the first mirror that has the original; raise what the last one raised."""
    failure: Exception = OSError("there is no mirror")
    for mirror in MIRRORS:
        try:
            data, limit = bytearray(), time.monotonic() + LONGEST
            with urllib.request.urlopen(mirror + file, timeout=SILENCE) as answer:
                while chunk := answer.read1(65536):  # read would wait until it has them all
                    data += chunk
                    if time.monotonic() > limit:
                        raise TimeoutError(f"{file} took more than {LONGEST} s")
            if original(bytes(data), file.removesuffix(".gz")) is not None:
                return bytes(data)
            failure = OSError(f"{mirror}{file} is not the file of MNIST, or not all of it")
        except (OSError, http.client.HTTPException) as error:
            failure = error
    raise failure


def load_torchvision_operators() -> bool:
    """Load torchvision's operators into PyTorch, as its import does; return whether that worked."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec else None
    library = next(Path(folders[0]).glob("_C*.so"), None) if folders else None
    if library is None:
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def declare_torchvision_operators() -> None:
    """Make torchvision importable with a PyTorch that its wheel was not built for.

    Its extension library then cannot be loaded, and its import looks up two operators that the
    library would have declared. Datasets, transforms and models need neither, so declaring their
    names is enough. With a matching wheel the real operators are loaded, and stay.
    """
    if load_torchvision_operators():
        return
    import torch

    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # declared already
            torch.library.define(
                f"torchvision::{operator}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


class _BeforeTorchvision:
    """Declares the operators just before the first import of torchvision, then removes itself.

    An import hook, because a learner's cell may import torchvision as well as the kit does. To
    declare them when ddp_kit is imported would cost each rank the time to load the library.
    """

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_torchvision_operators()


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTorchvision())
