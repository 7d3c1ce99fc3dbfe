"""Settings: defaults, limits just inside and just outside, addresses."""

import dataclasses
from typing import Any

import pytest

from tailbound.config import LossBound, Transport, format_address, parse_address
from tailbound.errors import ConfigError
from tailbound.impairments import Impairments

NAN, INF = float("nan"), float("inf")


def test_default_bound_is_the_papers() -> None:
    bound = LossBound()

    assert (bound.p_low, bound.p_high, bound.eta) == (0.008, 0.408, 0.5)
    assert (bound.test, bound.compare, bound.window) == ("change", "step", 1)
    assert (bound.holes, bound.order) == ("zero", "rotate")
    assert not bound.is_fixed


def test_fixed_bound_is_the_same_in_both_regimes() -> None:
    bound = LossBound.fixed(0.1)

    assert (bound.p_low, bound.p_high) == (0.1, 0.1)
    assert bound.is_fixed


@pytest.mark.parametrize(
    "settings",
    [
        {"p_low": 0.0, "p_high": 0.0},
        {"p_low": 0.999, "p_high": 0.999},
        {"eta": 1e-9},
        {"frequency": 1},
        {"window": 1},
        {"test": "drop", "compare": "check"},
        {"holes": "received_mean", "order": "norm"},
        {"order": "fixed"},
        {"holes": "residual"},
        {"holes": "residual", "residual_momentum": 0.999},
        {"p_back": 0.999, "resync_every": 1},
        {"deadline_s": 1e-9, "p_low": 0.0, "p_high": 0.0},
        {"deadline_s": 2},
        {"deadline_s": "auto", "p_low": 0.0, "p_high": 0.001},
        {"deadline_s": None, "p_low": 0.0, "p_high": 0.0},
        {"deadline_k": 1e-9, "deadline_cap_s": 1e-9},
    ],
)
def test_bound_just_inside_its_limits_is_taken(settings: dict[str, Any]) -> None:
    bound = LossBound(**settings)

    assert {name: getattr(bound, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_low": -0.001}, r"p_low is a share in \[0, 1\), not -0\.001"),
        ({"p_low": 1.0, "p_high": 1.0}, r"p_low is a share in \[0, 1\), not 1\.0"),
        ({"p_low": NAN}, "p_low is a share .* not nan"),
        ({"p_high": 1.0}, r"p_high is a share in \[p_low=0\.008, 1\), not 1\.0"),
        ({"p_low": 0.5, "p_high": 0.4}, r"p_high .*p_low=0\.5.* not 0\.4"),
        ({"p_high": NAN}, "p_high is a share .* not nan"),
        ({"eta": 0.0}, r"eta is a positive relative change, not 0\.0"),
        ({"eta": INF}, "eta is a positive relative change, not inf"),
        ({"frequency": 0}, "frequency is 1 or more rounds, not 0"),
        ({"window": 0}, "window is 1 or more rounds, not 0"),
        ({"test": "rise"}, r"test is one of \('change', 'drop'\), not 'rise'"),
        ({"compare": "epoch"}, "compare is one of .* not 'epoch'"),
        ({"holes": "nan"}, "holes is one of .* not 'nan'"),
        (
            {"holes": "residual", "residual_momentum": 1.0},
            r"residual_momentum is in \[0, 1\), not 1\.0",
        ),
        (
            {"holes": "residual", "residual_momentum": NAN},
            r"residual_momentum is in \[0, 1\), not nan",
        ),
        ({"p_back": 1.0}, r"p_back is a share in \[0, 1\), not 1\.0"),
        ({"p_back": NAN}, r"p_back is a share in \[0, 1\), not nan"),
        ({"resync_every": 0}, "resync_every is 1 or more steps, not 0"),
        ({"residual_momentum": 0.9}, "needs holes='residual', not 'zero'"),
        ({"order": "random"}, "order is one of .* not 'random'"),
        ({"deadline_s": 0.0}, r"deadline_s is None, 'auto' or .* seconds, not 0\.0"),
        ({"deadline_s": INF}, "deadline_s is None, 'auto' or .* not inf"),
        ({"deadline_s": "soon"}, "deadline_s is None, 'auto' or .* not 'soon'"),
        ({"deadline_k": 0.0}, r"deadline_k is a positive number, not 0\.0"),
        ({"deadline_cap_s": NAN}, "deadline_cap_s is a positive number, not nan"),
        (
            {"deadline_s": "auto", "p_low": 0.0, "p_high": 0.0},
            "deadline_s='auto' cuts no exact bound, and p_high is 0: give seconds",
        ),
    ],
)
def test_bound_just_outside_its_limits_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LossBound(**settings)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossBound().p_low = 0.5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Transport().mtu = 1500  # type: ignore[misc]


@pytest.mark.parametrize(
    "settings",
    [
        {"mtu": "auto"},
        {"mtu": 576},
        {"mtu": 65535},
        {"secret": "sixteen letters!"},
        {"timeout_s": 0.001},
        {"silence_s": 0.001},
        {"plan": "server", "server": "host:7000"},
        {"plan": "server", "server": "[::1]:7000"},
        {"port_range": (1, 65535)},
        {"port_range": (7000, 7000)},
        {"impairments": Impairments(delay_s=0.001)},
    ],
)
def test_transport_just_inside_its_limits_is_taken(settings: dict[str, Any]) -> None:
    transport = Transport(**settings)

    assert {name: getattr(transport, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": "ring"}, r"plan is one of \('sharded', 'server'\), not 'ring'"),
        ({"mtu": 575}, "mtu is 'auto' or 576 to 65535 bytes, not 575"),
        ({"mtu": 65536}, "mtu is .* not 65536"),
        ({"mtu": "large"}, "mtu is .* not 'large'"),
        (
            {"secret": "fifteen letters"},
            r"a secret has 16 characters or more; make one",
        ),
        ({"secret": ""}, r"a secret has 16 characters or more; make one"),
        ({"timeout_s": 0.0}, r"timeout_s is a positive number of seconds, not 0\.0"),
        ({"timeout_s": INF}, "timeout_s .* not inf"),
        ({"silence_s": -1.0}, r"silence_s .* not -1\.0"),
        ({"silence_s": NAN}, "silence_s .* not nan"),
        ({"plan": "server", "server": "host"}, "an address is host:port .* not 'host'"),
        ({"port_range": (0, 10)}, r"port_range is .* not \(0, 10\)"),
        ({"port_range": (10, 9)}, r"port_range is .* not \(10, 9\)"),
        ({"port_range": (1, 65536)}, r"port_range is .* not \(1, 65536\)"),
    ],
)
def test_transport_just_outside_its_limits_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Transport(**settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:7000", ("localhost", 7000)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_address_splits_into_host_and_port_and_back(
    text: str, expected: tuple[str, int]
) -> None:
    assert parse_address(text) == expected
    assert format_address(*expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":7000",
        "[]:7000",
        "host:",
        "host:http",
        "host:65536",
        "host:-1",
        "host:7 000",
        "::1:7000",
        "[::1]7000",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an address is host:port or"):
        parse_address(text)
