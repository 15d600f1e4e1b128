"""MNIST without a network, and torchvision with a PyTorch that it was not built for."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

from ddp_kit.errors import DataError

if TYPE_CHECKING:
    from torchvision.datasets import MNIST

DIGITS = Path(__file__).parent / "digits"


def mnist(train: bool = True, full: bool = False) -> MNIST:
    """Return MNIST's handwritten digits as a torchvision dataset, normalised as in the tutorial.

    train: return the training digits, else the test digits.
    full: use all 70,000 digits, which torchvision downloads once into the user's cache; else the
        first 10,000 training and 2,000 test digits, which are part of the package.

    Each item is (image, label): a float32 tensor of shape (1, 28, 28), and an int from 0 to 9.
    Raises DataError if `full` is set and there is neither an earlier download nor a network, or if
    an argument is no bool.
    Source: MNIST by Y. LeCun and C. Cortes, CC BY-SA 3.0.
    """
    for name, value in (("train", train), ("full", full)):
        if not isinstance(value, bool):
            raise DataError(f"{name} must be True or False, got {value!r}")
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    if not full:
        return _packaged(train, transform)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "ddp_kit")
    try:
        return datasets.MNIST(folder, train=train, transform=transform, download=True)
    except (RuntimeError, URLError, ConnectionError, TimeoutError):
        raise DataError(
            "the full MNIST could not be downloaded, and there is no earlier download; "
            "connect to a network once, or use kit.mnist(), which needs no network"
        ) from None


def _packaged(train: bool, transform: Callable) -> MNIST:
    """Return a torchvision MNIST with the package's digits; its own __init__ needs raw files."""
    from torchvision import datasets

    part = "train" if train else "t10k"
    dataset = datasets.MNIST.__new__(datasets.MNIST)
    datasets.VisionDataset.__init__(dataset, root="ddp_kit", transform=transform)
    dataset.train = train
    dataset.data = read_idx(DIGITS / f"{part}-images-idx3-ubyte.gz")
    dataset.targets = read_idx(DIGITS / f"{part}-labels-idx1-ubyte.gz").long()
    return dataset


def read_idx(path: Path):
    """Return the values of a gzipped IDX file of bytes as a uint8 tensor.

    The format: two zero bytes, the type (8 for bytes), the number of dimensions, each
    dimension as a big-endian int32, then the data.
    """
    import torch

    data = gzip.decompress(path.read_bytes())
    zero, kind, dimensions = struct.unpack_from(">HBB", data)
    if zero != 0 or kind != 8:
        raise DataError(f"{path.name} is not an IDX file of bytes; reinstall ddp_kit")
    shape = struct.unpack_from(f">{dimensions}i", data, 4)
    body = bytearray(data[4 + 4 * dimensions :])
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
