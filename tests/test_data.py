"""The packaged digits, and torchvision with a PyTorch that it was not built for."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import pickle
import subprocess
import sys
import threading
from unittest.mock import patch

import pytest
import torch

import ddp_kit as kit
from ddp_kit import data


def test_digits_are_a_torchvision_dataset_and_normalised():
    from torchvision import datasets

    digits = kit.mnist()
    assert isinstance(digits, datasets.MNIST)
    assert (len(digits), len(kit.mnist(train=False))) == (10_000, 2_000)
    image, label = digits[0]
    assert (image.shape, image.dtype, label) == ((1, 28, 28), torch.float32, 5)
    expected = (digits.data[7].float() / 255 - 0.1307) / 0.3081  # as in the tutorial
    torch.testing.assert_close(digits[7][0][0], expected)


def test_a_dataset_travels_to_a_rank_and_back():
    digits = kit.mnist(train=False)
    result = kit.run(lambda rank, world_size, d: (len(d), d[rank][1]), digits, world_size=2)
    assert list(result) == [(2_000, 7), (2_000, 2)]
    assert len(pickle.loads(pickle.dumps(digits))) == 2_000


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves the packaged digits; below /missing/, /other/, /half/ and /stuck/ it is a bad mirror.

    Below /stuck/ it sends one byte, and the others when `given_up` is set.
    """

    requests: list[str] = []
    given_up: threading.Event

    def do_GET(self):
        self.requests.append(self.path)
        *way, file = self.path[1:].split("/")
        if way == ["missing"]:
            self.send_error(404)
            return
        content = (data.DIGITS / file).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if way == ["other"]:
            content = content[::-1]
        if way == ["stuck"]:
            self.wfile.write(content[:1])
            self.given_up.wait(20)
            content = content[1:]
        self.wfile.write(content[: len(content) // 2] if way == ["half"] else content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    """Serve what takes the place of the full MNIST, with an empty cache; return the handler."""
    handler = type("Own", (Mirror,), {"requests": [], "given_up": threading.Event()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr(data, "MIRRORS", (f"http://127.0.0.1:{server.server_port}/",))
    yield handler
    handler.given_up.set()
    server.shutdown()
    thread.join()
    server.server_close()


@functools.cache
def sha256(name):
    return hashlib.sha256(gzip.decompress((data.DIGITS / f"{name}.gz").read_bytes())).hexdigest()


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Let the packaged digits pass for the full MNIST, and the cache be empty."""
    for name in data.FILES:
        monkeypatch.setitem(data.FILES, name, sha256(name))
    monkeypatch.setattr(data, "MIRRORS", ("http://127.0.0.1:9/",))  # nothing listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DDP_KIT_MNIST", raising=False)


@pytest.fixture
def raw(tmp_path):
    return tmp_path / "cache" / "ddp_kit" / "MNIST" / "raw"


def fill(folder, compressed):
    folder.mkdir(parents=True)
    for file in data.DIGITS.glob("*.gz"):
        if compressed:  # again, so that the bytes are others
            again = gzip.compress(gzip.decompress(file.read_bytes()), compresslevel=1)
            (folder / file.name).write_bytes(again)
        else:
            (folder / file.stem).write_bytes(gzip.decompress(file.read_bytes()))


def assert_digits(digits):
    assert len(digits) == 10_000
    assert torch.equal(digits.data, kit.mnist().data)
    assert torch.equal(digits.targets, kit.mnist().targets)


def test_without_a_network_one_sentence_says_which_files_go_where(raw):
    with pytest.raises(kit.DataError, match="could not be downloaded") as caught:
        kit.mnist(full=True)
    text = str(caught.value)
    assert "\n" not in text
    assert str(raw) in text
    assert all(f"{name}.gz" in text for name in data.FILES)
    assert data.MIRRORS[0] in text


@pytest.mark.parametrize(
    ("way", "place", "compressed"),
    [
        ("folder", "", True),
        ("folder", "raw", False),
        ("variable", "MNIST/raw", True),
        ("cache", "MNIST/raw", False),
    ],
)
def test_the_full_mnist_is_found_wherever_it_may_lie(tmp_path, monkeypatch, way, place, compressed):
    own = tmp_path / ("cache/ddp_kit" if way == "cache" else "own")
    fill(own / place, compressed)
    if way != "cache":  # a folder wins over the variable
        nowhere = tmp_path / "nowhere"
        monkeypatch.setenv("DDP_KIT_MNIST", str(own if way == "variable" else nowhere))
    assert_digits(kit.mnist(full=True, folder=own if way == "folder" else None))


def test_a_folder_without_a_file_is_an_error_and_no_download(tmp_path, mirror):
    fill(tmp_path / "own", compressed=True)
    (tmp_path / "own" / "t10k-images-idx3-ubyte.gz").unlink()
    assert_digits(kit.mnist(full=True, folder=tmp_path / "own"))  # which does not need it
    with pytest.raises(kit.DataError, match="own lacks t10k-images-idx3-ubyte, compressed or"):
        kit.mnist(train=False, full=True, folder=tmp_path / "own")
    (tmp_path / "own" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(kit.DataError, match="images-idx3-ubyte and t10k-labels-idx1-ubyte, comp"):
        kit.mnist(train=False, full=True, folder=tmp_path / "own")
    assert mirror.requests == []


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: d[:-1] + b"?"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_file_is_refused(tmp_path, raw, compressed, damage):
    name = "train-labels-idx1-ubyte" + ".gz" * compressed
    for folder, advice in ((tmp_path / "own", "replace it"), (raw, "delete it, and the next")):
        fill(folder, compressed)
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        with pytest.raises(kit.DataError, match=f"{name} is damaged or not .*; {advice}"):
            kit.mnist(full=True, folder=None if folder is raw else folder)


def test_a_download_happens_once_and_leaves_the_four_files(mirror, raw, capsys):
    assert_digits(kit.mnist(full=True))
    assert len(kit.mnist(train=False, full=True)) == 2_000
    files = sorted(f"{name}.gz" for name in data.FILES)
    assert sorted(path[1:] for path in mirror.requests) == files
    assert sorted(path.name for path in raw.iterdir()) == [".lock", *files]
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"downloading {file}, of 11.6 MB in all" for file in files]


def test_ranks_that_need_it_at_once_download_it_once(mirror, tmp_path):
    def load(rank, world_size, mirrors, files, cache):
        environment = {"XDG_CACHE_HOME": cache, "no_proxy": "127.0.0.1"}
        with (
            patch.object(data, "MIRRORS", mirrors),
            patch.dict(data.FILES, files),
            patch.dict(os.environ, environment),
        ):
            torch.distributed.barrier()
            return len(kit.mnist(full=True))

    arguments = data.MIRRORS, data.FILES, str(tmp_path / "cache")
    assert list(kit.run(load, *arguments, world_size=2)) == [10_000, 10_000]
    assert len(mirror.requests) == 4


@pytest.mark.parametrize("bad", ["missing", "other", "half"])
def test_after_a_bad_mirror_the_next_is_asked_and_nothing_is_left(mirror, monkeypatch, raw, bad):
    (good,) = data.MIRRORS
    monkeypatch.setattr(data, "MIRRORS", (f"{good}{bad}/",))
    with pytest.raises(kit.DataError, match="could not be downloaded"):
        kit.mnist(full=True)
    assert [path.name for path in raw.iterdir()] == [".lock"]
    monkeypatch.setattr(data, "MIRRORS", (f"{good}{bad}/", good))
    assert_digits(kit.mnist(full=True))


def test_a_mirror_that_sends_almost_nothing_is_waited_for_until_the_limit(mirror, monkeypatch):
    (good,) = data.MIRRORS
    monkeypatch.setattr(data, "MIRRORS", (f"{good}stuck/",))
    monkeypatch.setattr(data, "SILENCE", 5)
    monkeypatch.setattr(data, "LONGEST", 0)  # so that the first byte is too late
    with pytest.raises(kit.DataError, match=r"train-images-idx3-ubyte\.gz took more than 0 s"):
        kit.mnist(full=True)


def test_a_folder_for_the_packaged_digits_is_refused():
    with pytest.raises(kit.DataError, match="pass full=True, too"):
        kit.mnist(folder="digits")


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
