"""The packaged digits, and torchvision with a PyTorch that it was not built for."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves the packaged digits; below /missing/, /other/ and /half/ it is a bad mirror."""

    requests: list[str] = []

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
        self.wfile.write(content[: len(content) // 2] if way == ["half"] else content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    """Serve what takes the place of the full MNIST, with an empty cache; return the handler."""
    handler = type("Own", (Mirror,), {"requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr(data, "MIRRORS", (f"http://127.0.0.1:{server.server_port}/",))
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


@functools.cache
def sha256(name):
    return hashlib.sha256(gzip.decompress((data.DIGITS / f"{name}.gz").read_bytes())).hexdigest()


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Let the packaged digits pass for the full MNIST, and the cache be empty."""
    monkeypatch.setattr(data, "FILES", {name: sha256(name) for name in data.FILES})
    packed = [path.stat().st_size for path in data.DIGITS.glob("*.gz")]
    monkeypatch.setattr(data, "SIZE", sum(packed))
    monkeypatch.setattr(data, "MIRRORS", ("http://127.0.0.1:9/",))  # nothing listens there
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
def test_the_full_mnist_is_not_found(tmp_path, monkeypatch, way, place, compressed):
    own = tmp_path / ("cache/ddp_kit" if way == "cache" else "own")
    fill(own / place, compressed)
    if way == "variable":
        monkeypatch.setenv("DDP_KIT_MNIST", str(own))
    assert_digits(kit.mnist(full=True, folder=own if way == "folder" else None))


def test_the_folder_wins_over_the_variable(tmp_path, monkeypatch):
    fill(tmp_path / "own", compressed=False)
    monkeypatch.setenv("DDP_KIT_MNIST", str(tmp_path / "nowhere"))
    assert_digits(kit.mnist(full=True, folder=str(tmp_path / "own")))


def test_a_folder_without_a_file_downloads_another(tmp_path, mirror):
    fill(tmp_path / "own", compressed=True)
    (tmp_path / "own" / "t10k-images-idx3-ubyte.gz").unlink()
    assert_digits(kit.mnist(full=True, folder=tmp_path / "own"))  # which does not need it
    with pytest.raises(kit.DataError, match=r"own has neither t10k-images-idx3-ubyte\.gz, comp"):
        kit.mnist(train=False, full=True, folder=tmp_path / "own")
    assert mirror.requests == []


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: d[:-1] + b"?", lambda d: b""])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_file_is_read(tmp_path, raw, compressed, damage):
    name = "train-labels-idx1-ubyte" + ".gz" * compressed
    for folder, advice in ((tmp_path / "own", "replace it"), (raw, "delete it, and the next")):
        fill(folder, compressed)
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        with pytest.raises(kit.DataError, match=f"{name} is damaged or not .*; {advice}"):
            kit.mnist(full=True, folder=None if folder is raw else folder)


def test_a_download_happens_twice_or_leaves_more_than_the_four_files(mirror, raw, capsys):
    assert_digits(kit.mnist(full=True))
    assert len(kit.mnist(train=False, full=True)) == 2_000
    files = sorted(f"{name}.gz" for name in data.FILES)
    assert sorted(path[1:] for path in mirror.requests) == files
    assert sorted(path.name for path in raw.iterdir()) == [".lock", *files]
    assert capsys.readouterr() == ("", "")  # it is no terminal


def test_a_terminal_sees_no_progress(mirror, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    kit.mnist(full=True)
    shown = capsys.readouterr().err
    assert shown.endswith(f"[{'#' * 25}] 100 % of 1.9 MB\n")
    assert shown.count("\r") <= 100


def test_ranks_that_need_it_at_once_download_it_several_times(mirror):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: kit.mnist(full=True), range(4)))
    for digits in found:
        assert_digits(digits)
    assert len(mirror.requests) == 4


@pytest.mark.parametrize("bad", ["missing", "other", "half"])
def test_a_bad_mirror_is_the_end_or_leaves_something(mirror, monkeypatch, raw, bad):
    (good,) = data.MIRRORS
    monkeypatch.setattr(data, "MIRRORS", (f"{good}{bad}/",))
    with pytest.raises(kit.DataError, match="could not be downloaded"):
        kit.mnist(full=True)
    assert [path.name for path in raw.iterdir()] == [".lock"]
    monkeypatch.setattr(data, "MIRRORS", (f"{good}{bad}/", good))
    assert_digits(kit.mnist(full=True))


def test_an_interrupt_leaves_half_a_file(mirror, monkeypatch, raw):
    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kit.mnist(full=True)
    assert [path.name for path in raw.iterdir()] == [".lock"]


def test_a_folder_for_the_packaged_digits_is_ignored():
    with pytest.raises(kit.DataError, match="pass full=True, too"):
        kit.mnist(folder="digits")


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
