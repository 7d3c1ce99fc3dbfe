"""What the data looks like, and one clear line where it is not there."""

import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tailbound.errors import ConfigError, MissingExtraError
from tailbound.lab import datasets

CIFAR10_FILES = (
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
)


@pytest.fixture
def cifar10_folder(tmp_path: Path) -> Path:
    """Two rows a file: label = the file's place, and red, green, blue = 1, 2, 3."""
    for place, name in enumerate(CIFAR10_FILES):
        row = bytes([place]) + b"\x01" * 1024 + b"\x02" * 1024 + b"\x03" * 1024
        (tmp_path / name).write_bytes(row * 2)
    return tmp_path


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make the imports of these modules fail as if they were not installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


# digits


@pytest.mark.slow
def test_digits_are_split_four_to_one_in_every_class() -> None:
    digits = datasets.digits()

    assert digits.train_x.shape == (1437, 1, 8, 8)
    assert digits.train_x.dtype == torch.float32
    assert digits.test_x.shape == (360, 1, 8, 8)
    per_class = digits.test_y.bincount().tolist()
    assert len(per_class) == 10
    assert set(per_class) <= {35, 36, 37}
    assert abs(digits.train_x.mean().item()) < 0.05
    assert abs(digits.train_x.std().item() - 1.0) < 0.05


@pytest.mark.slow
def test_no_digit_is_lost_or_doubled_by_the_split() -> None:
    """scikit-learn's 1797 images sum to 561718 grey levels, the labels to 8070."""
    digits = datasets.digits()

    grey = torch.cat([digits.train_x, digits.test_x]).double() * 6.0 + 4.9
    assert round(grey.sum().item()) == 561718
    assert int(digits.train_y.sum() + digits.test_y.sum()) == 8070


def test_digits_without_scikit_learn_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "sklearn", "sklearn.datasets")
    datasets.digits.cache_clear()

    with pytest.raises(MissingExtraError) as caught:
        datasets.digits()

    assert str(caught.value) == (
        "task 'digits' needs scikit-learn; run: pip install \"tailbound[demo]\""
    )


# mnist1d


def test_mnist1d_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "mnist1d", "mnist1d.data")
    datasets.generate_mnist1d.cache_clear()

    with pytest.raises(MissingExtraError) as caught:
        datasets.mnist1d()

    assert str(caught.value) == (
        "task 'mnist1d' needs mnist1d; run: pip install \"tailbound[demo]\""
    )


class Generated(NamedTuple):
    mnist1d: datasets.Dataset
    python_random: float
    numpy_random: float


@pytest.fixture(scope="module")
def generated() -> Generated:
    """Generated once, between seeding the global generators and drawing from them."""
    datasets.generate_mnist1d.cache_clear()
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002  the generator under test seeds this one
    return Generated(
        mnist1d=datasets.mnist1d(),
        python_random=random.random(),
        numpy_random=float(np.random.rand()),  # noqa: NPY002
    )


@pytest.mark.slow
def test_mnist1d_is_what_its_generator_makes(generated: Generated) -> None:
    """The literals are what the generator gave when it was run by itself."""
    mnist1d = generated.mnist1d

    assert mnist1d.train_x.shape == (4000, 1, 40)
    assert mnist1d.train_x.dtype == torch.float32
    assert mnist1d.test_x.shape == (1000, 1, 40)
    assert mnist1d.train_y[:8].tolist() == [2, 6, 4, 5, 6, 6, 6, 0]
    assert mnist1d.train_x[0, 0, 0].item() == pytest.approx(-0.33200567, abs=1e-5)


@pytest.mark.slow
def test_generating_mnist1d_leaves_the_global_generators_as_they_were(
    generated: Generated,
) -> None:
    assert round(generated.python_random, 6) == 0.323833
    assert round(generated.numpy_random, 6) == 0.076308


@pytest.mark.slow
def test_a_folder_keeps_mnist1d_for_processes_without_its_package(
    generated: Generated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    datasets.mnist1d(folder)
    without(monkeypatch, "mnist1d", "mnist1d.data")

    kept = datasets.mnist1d(folder)

    assert torch.equal(kept.train_x, generated.mnist1d.train_x)
    assert torch.equal(kept.test_y, generated.mnist1d.test_y)
    assert list(folder.iterdir()) == [folder / "tailbound-mnist1d.npz"]


def arrays() -> datasets.Arrays:
    return {"x": np.arange(3.0), "y": np.arange(3)}


def must_not_run() -> datasets.Arrays:
    raise AssertionError("the cache was there")


def test_a_cache_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "cache.npz"

    datasets.cached(path, ("x", "y"), make=arrays)
    kept = datasets.cached(path, ("x", "y"), make=must_not_run)

    assert kept["x"].tolist() == [0.0, 1.0, 2.0]
    assert kept["y"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut short"])
def test_a_cache_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cache.npz"
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        datasets.cached(path, ("x",), make=must_not_run)

    assert str(caught.value) == (
        f"{path} is not the cache that tailbound wrote; delete it to make it anew"
    )


def test_a_cache_of_other_arrays_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cache.npz"
    datasets.cached(path, ("x", "y"), make=arrays)

    with pytest.raises(ConfigError, match="delete it to make it anew"):
        datasets.cached(path, ("x", "z"), make=must_not_run)


def test_a_cache_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "cache.npz"

    with pytest.raises(ConfigError) as caught:
        datasets.cached(path, ("x",), make=must_not_run)

    assert str(caught.value) == (
        f"cannot read {path} (Not a directory); name another folder"
    )


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "nowhere")
    path = tmp_path / "folder" / "cache.npz"

    with pytest.raises(ConfigError) as caught:
        datasets.cached(path, ("x", "y"), make=arrays)

    assert str(caught.value) == (
        f"cannot write {path} (File exists); name another folder"
    )


# text


def test_text_is_cut_into_windows_and_their_successors(tmp_path: Path) -> None:
    """100 bytes: 90 to train are 44 windows of 2, 10 held out are 4."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))

    text = datasets.text(path, context=2)

    assert text.train_x.dtype == torch.uint8
    assert text.train_x.shape == (44, 2)
    assert text.train_x[:2].tolist() == [[0, 1], [2, 3]]
    assert text.train_y[:2].tolist() == [[1, 2], [3, 4]]
    assert text.test_x.tolist() == [[90, 91], [92, 93], [94, 95], [96, 97]]
    assert text.test_y.tolist() == [[91, 92], [93, 94], [95, 96], [97, 98]]


def test_a_long_text_holds_out_no_more_than_an_evaluation_takes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 1_000_000)

    text = datasets.text(path, context=64)

    assert text.test_x.shape == (1023, 64)


def test_a_text_of_the_least_length_is_enough_and_one_byte_less_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 90)
    assert len(datasets.text(path, context=8).test_x) == 1

    path.write_bytes(b"a" * 89)
    with pytest.raises(ConfigError) as caught:
        datasets.text(path, context=8)

    assert str(caught.value) == (f"{path} has 89 bytes; the text task needs 90 or more")


def test_a_text_that_is_a_folder_or_is_not_there_or_is_empty_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").touch()
    for path, reason in (
        (tmp_path, f"cannot read {tmp_path} (Is a directory); expected a text file"),
        (
            tmp_path / "gone",
            f"cannot read {tmp_path / 'gone'} (No such file or directory); "
            "expected a text file",
        ),
        (
            tmp_path / "empty",
            f"{tmp_path / 'empty'} is empty; expected a text file",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            datasets.text(path, context=8)
        assert str(caught.value) == reason


def test_the_default_text_is_the_standard_librarys_source() -> None:
    """Half a mebibyte: 7372 windows of 64 to train, 819 held out."""
    text = datasets.text(context=64)

    assert text.train_x.shape == (7372, 64)
    assert text.test_x.shape == (819, 64)
    # The first module by name is __future__.py.
    assert bytes(text.train_x[0, :21].tolist()) == b'"""Record of phased-i'


def test_source_is_read_in_the_order_of_the_names_and_no_further(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.py").write_bytes(b"b" * 400_000)
    (tmp_path / "a.py").write_bytes(b"a" * 400_000)
    (tmp_path / "c.py").symlink_to(tmp_path / "nowhere")

    source = datasets.python_source(tmp_path)

    # 2 ** 19 - 400000
    assert source.bincount()[97:].tolist() == [400_000, 124_288]


def test_a_python_without_its_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"pass\n")

    with pytest.raises(ConfigError) as caught:
        datasets.python_source(tmp_path)

    assert str(caught.value) == (
        f"{tmp_path} holds 5 bytes of Python source, the text task's default needs "
        "524288; give a text file of your own"
    )


# cifar10


def test_cifar10_files_become_images_and_labels(cifar10_folder: Path) -> None:
    cifar10 = datasets.cifar10(cifar10_folder)

    assert cifar10.train_x.shape == (10, 3, 32, 32)
    assert cifar10.train_x.dtype == torch.uint8
    assert cifar10.train_y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert cifar10.test_y.tolist() == [5, 5]
    assert cifar10.test_x[0, :, 31, 31].tolist() == [1, 2, 3]


def test_a_missing_cifar10_file_is_named(cifar10_folder: Path) -> None:
    path = cifar10_folder / "data_batch_3.bin"
    path.unlink()

    with pytest.raises(ConfigError) as caught:
        datasets.cifar10(cifar10_folder)

    assert str(caught.value) == (
        f"cannot read {path} (No such file or directory); "
        "expected rows of 3073 bytes of CIFAR-10's binary version"
    )


def test_a_short_cifar10_file_is_named(cifar10_folder: Path) -> None:
    path = cifar10_folder / "test_batch.bin"
    path.write_bytes(b"\x00" * 3072)

    with pytest.raises(ConfigError) as caught:
        datasets.cifar10(cifar10_folder)

    assert str(caught.value) == (
        f"{path} has 3072 bytes, expected whole rows of 3073 bytes of CIFAR-10's "
        "binary version; is the download complete?"
    )


def test_a_file_whose_labels_are_none_is_named(cifar10_folder: Path) -> None:
    path = cifar10_folder / "data_batch_1.bin"
    path.write_bytes(b"\x0a" + b"\x00" * 3072)

    with pytest.raises(ConfigError) as caught:
        datasets.cifar10(cifar10_folder)

    assert str(caught.value) == (
        f"{path} has label 10, expected 0 to 9 and rows of 3073 bytes of CIFAR-10's "
        "binary version"
    )
