"""The public face: what it holds, where each name lives, and what importing costs."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import tailbound

PUBLIC = [
    "BurstLoss",
    "Certificates",
    "ComputeBound",
    "ConfigError",
    "DdpState",
    "EpochReport",
    "GilbertElliottLoss",
    "HandshakeError",
    "Impairments",
    "IndependentLoss",
    "Job",
    "JobClosedError",
    "LocalSGD",
    "LossBound",
    "MissingExtraError",
    "PeerLostError",
    "PeerProtocolError",
    "RecordWriter",
    "RemoteError",
    "ResamplingSampler",
    "RoundReport",
    "RoundTimeoutError",
    "Server",
    "ShapeError",
    "StepReport",
    "TailboundError",
    "ThresholdReport",
    "Transport",
    "UnreachableError",
    "attach",
    "bounded_allreduce",
    "ddp_state",
    "record_latencies",
]
HEAVY = ("torch", "matplotlib", "numpy", "msgspec", "rich", "typer")


def test_the_public_names_change_only_on_purpose() -> None:
    assert tailbound.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(tailbound, name)

    assert value.__name__ == name
    assert (value.__doc__ or "").strip()
    assert name in dir(tailbound)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_one_home(name: str) -> None:
    """Else two classes of one name could differ, and an except clause miss one."""
    value = getattr(tailbound, name)

    home = import_module(value.__module__)

    assert home.__name__.startswith("tailbound.")
    assert getattr(home, name) is value
    others = [
        module.__name__
        for module in all_modules()
        if getattr(module, name, value) is not value
    ]
    assert others == []


def all_modules() -> list[ModuleType]:
    """Those of the package that are loaded."""
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("tailbound.")
    ]


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tailbound' has no attribute 'atach'"):
        tailbound.atach  # noqa: B018


def loaded_by(code: str) -> list[str]:
    """Which heavy packages a new Python has loaded after this code."""
    told = (
        f"import json, sys; print(json.dumps([n for n in {HEAVY} if n in sys.modules]))"
    )
    source = str(Path(tailbound.__file__).parents[1])
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {source!r})\n{code}\n{told}",
        ],
        capture_output=True,
        check=True,
        text=True,
        timeout=60.0,
    )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import tailbound", []),
        ("import tailbound; tailbound.ConfigError", []),
        (
            "import tailbound; tailbound.LossBound(), tailbound.Server",
            ["numpy", "msgspec"],
        ),
        ("import tailbound.cli", ["typer"]),
        ("import tailbound.cli; tailbound.cli.run(['demo', '--help'])", ["typer"]),
        ("import tailbound; tailbound.attach", ["torch", "numpy", "msgspec"]),
    ],
)
def test_an_import_loads_what_it_needs_and_no_more(
    code: str, loaded: list[str]
) -> None:
    assert loaded_by(code) == loaded


@pytest.mark.slow
@pytest.mark.processes
def test_the_server_process_of_the_demo_needs_no_torch() -> None:
    assert "torch" not in loaded_by("import tailbound.lab.demo_process")
