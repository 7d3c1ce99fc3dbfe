"""Folders that a command fills with ``--out``, and what can go wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailbound.compute.simulate import Simulation
from tailbound.errors import ConfigError
from tailbound.report.build import needs_matplotlib, write_whole


@contextmanager
def filled_folder(folder: Path) -> Iterator[None]:
    """Make a folder; drawing and writing into it goes into the ``with`` block.

    Raises:
        ConfigError: the folder cannot be made or written.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with needs_matplotlib("plots need"):
            yield
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error


def write_simulation(folder: Path, simulation: Simulation) -> Path:
    """Write ``simulation.json`` and the scale graph as PNG and SVG.

    Returns:
        The path of the PNG.

    Raises:
        ConfigError, MissingExtraError: see :func:`filled_folder`.
    """
    with filled_folder(folder):
        from tailbound.report.scale_graph import draw_scale_graph

        write_whole(folder / "simulation.json", simulation.to_json())
        (folder / "scale_graph.svg").write_bytes(draw_scale_graph(simulation, "svg"))
        picture = folder / "scale_graph.png"
        picture.write_bytes(draw_scale_graph(simulation, "png"))
    return picture
