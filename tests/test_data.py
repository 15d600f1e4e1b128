"""The packaged digits, and torchvision with a PyTorch that it was not built for."""

from __future__ import annotations

import gzip
import pickle
import subprocess
import sys

import pytest
import torch

import ddp_kit as kit
from ddp_kit import data


def test_digits_are_a_torchvision_dataset():
    from torchvision import datasets

    digits = kit.mnist()
    assert isinstance(digits, datasets.MNIST)
    assert (len(digits), len(kit.mnist(train=False))) == (10_000, 2_000)
    image, label = digits[0]
    assert (image.shape, image.dtype, label) == ((1, 28, 28), torch.float32, 5)


def test_digits_are_normalised_as_in_the_tutorial():
    digits = kit.mnist()
    expected = (digits.data[7].float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(digits[7][0][0], expected)


def test_digits_are_the_first_of_the_original_files():
    # Label counts of MNIST's first 10,000 training and first 2,000 test digits.
    counts = kit.mnist().targets.bincount().tolist()
    assert counts == [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    counts = kit.mnist(train=False).targets.bincount().tolist()
    assert counts == [175, 234, 219, 207, 217, 179, 178, 205, 192, 194]


def test_a_dataset_travels_to_a_rank_and_back():
    digits = kit.mnist(train=False)
    result = kit.run(lambda rank, world_size, d: (len(d), d[rank][1]), digits, world_size=2)
    assert list(result) == [(2_000, 7), (2_000, 2)]
    assert len(pickle.loads(pickle.dumps(digits))) == 2_000


def test_full_mnist_without_a_network_raises_one_sentence(tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nothing listens there
    with pytest.raises(kit.DataError, match="could not be downloaded") as caught:
        kit.mnist(full=True)
    assert "\n" not in str(caught.value)


def test_full_mnist_is_read_from_an_earlier_download(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    raw = tmp_path / "ddp_kit" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in data.DIGITS.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    assert len(kit.mnist(full=True)) == 10_000


def test_a_damaged_file_is_named(tmp_path):
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"\0\1\2\3"))
    with pytest.raises(kit.DataError, match=r"broken\.gz is not an IDX file"):
        data.read_idx(broken)


@pytest.mark.parametrize("first", ["import ddp_kit", "import ddp_kit; ddp_kit.mnist()"])
def test_torchvision_imports_after_the_kit(first):
    code = f"{first}; import torchvision.transforms.v2, torchvision.models; print('fine')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("fine\n", "")


def test_torchvision_imports_in_a_rank():
    def models(rank, world_size):
        import torchvision

        return torchvision.models.resnet18().fc.out_features

    assert list(kit.run(models, world_size=2)) == [1000, 1000]


@pytest.mark.parametrize("wrong", [{"train": "test"}, {"full": 1}])
def test_an_argument_that_is_no_bool_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(kit.DataError, match=f"{name} must be True or False, got"):
        kit.mnist(**wrong)
