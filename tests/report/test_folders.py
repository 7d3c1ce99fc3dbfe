"""Folders that a command fills."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from tailbound.compute.simulate import simulate
from tailbound.errors import ConfigError, MissingExtraError
from tailbound.report.folders import filled_folder, write_simulation


@pytest.mark.slow
def test_a_simulation_is_numbers_and_two_pictures(tmp_path: Path) -> None:
    simulation = simulate("delay", [1, 4], steps=20)

    picture = write_simulation(tmp_path / "sim", simulation)

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (picture.parent / "scale_graph.svg").read_text().startswith("<?xml")
    told = json.loads((picture.parent / "simulation.json").read_text(encoding="utf-8"))
    assert [point["workers"] for point in told["points"]] == [1, 4]


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **settings: Any) -> Any:
        if name == "tailbound.report.scale_graph":
            raise ModuleNotFoundError(name="matplotlib.axes")
        return real(name, *rest, **settings)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)

    with pytest.raises(MissingExtraError, match=r'pip install "tailbound\[demo\]"'):
        write_simulation(tmp_path, simulate("delay", [1], steps=1))


@pytest.mark.parametrize("name", ["numpy", None])
def test_another_missing_module_is_a_bug_and_comes_out(
    tmp_path: Path, name: str | None
) -> None:
    with pytest.raises(ModuleNotFoundError), filled_folder(tmp_path):
        raise ModuleNotFoundError(name=name)


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with (
        pytest.raises(ConfigError, match=r"cannot write .*file: File exists"),
        filled_folder(tmp_path / "file"),
    ):
        pass
