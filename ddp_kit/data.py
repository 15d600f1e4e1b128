"""MNIST with and without a network, and torchvision with a PyTorch that it was not built for."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_kit.download import FILES, download, original
from ddp_kit.errors import DataError

if TYPE_CHECKING:
    import torch
    from torchvision.datasets import MNIST

DIGITS = Path(__file__).parent / "lessons" / "data" / "digits"
PLACES = ("", "raw", "MNIST/raw")  # below a folder; torchvision uses the last
MEAN, DEVIATION = 0.1307, 0.3081  # of the training images, scaled to 0 to 1 and rounded


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
    for name, value in (("train", train), ("full", full)):
        if not isinstance(value, bool):
            raise DataError(f"{name} must be True or False, got {value!r}")
    if folder is not None:
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise DataError(f"folder must be the path of a folder, got {folder!r}")
        if not full:
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
    try:
        place = Path(own).expanduser() if own else _cache()
        found = {name: _find(place, name) for name in FILES}
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        where = f"the folder {str(own)!r}" if own else "the cache in the home directory"
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{where} cannot be searched for MNIST: {reason}") from None
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


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddp_kit")


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
        with suppress(RuntimeError):  # declared already
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
