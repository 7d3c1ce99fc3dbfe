"""Settings: frozen, validated when made, each with its default's reason.

``ComputeBound`` is the compute tail's bound, ``LossBound`` the network tail's,
``Transport`` how bytes travel.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from tailbound.errors import ConfigError
from tailbound.impairments import Impairments

MIN_SEALED_MTU = 600
"""What sealing adds to a datagram comes on top of the smallest packet."""
MIN_SECRET = 16
"""Characters of a secret: who overheard a proof can try secrets out."""

Test = Literal["change", "drop"]
Compare = Literal["step", "check"]
Holes = Literal["zero", "received_mean", "residual"]
Order = Literal["rotate", "fixed", "norm"]
Repairing = Literal["plain", "burst"]
Plan = Literal["sharded", "server"]
Security = Literal["session", "authenticated", "encrypted"]
Preempt = Literal["micro_batch", "backward"]
Partial = Literal["keep", "discard"]
Normalize = Literal["computed", "planned", "constant"]
Compensate = Literal["resample", "extra_steps", "batch"]


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with this message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0.0 and math.isfinite(value)


def _check_choices(*choices: tuple[str, str, tuple[str, ...]]) -> None:
    for name, value, allowed in choices:
        require(value in allowed, f"{name} is one of {allowed}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBound:
    """How long a rank computes before it joins the exchange with what it has.

    Source: DropCompute, Algorithms 1 and 2; spec C1, C3, C6, C7.
    """

    threshold_s: float | Literal["auto"] = "auto"
    """Seconds of compute in a step (tau), from the first step on; or ``auto``: found
    from measured latencies."""
    max_drop: float = 0.10
    """Largest share of micro-batches that ``auto`` may expect to drop, in [0, 1]. Up to
    10 % the papers saw no loss of accuracy."""
    calibration_steps: int = 20
    """Steps without a threshold whose latencies ``auto`` is computed from."""
    warmup_steps: int = 5
    """Steps before those, left out: compilers, caches and allocators settle."""
    retune_every: int = 500
    """Steps after which ``auto`` looks again, with the latencies since."""
    preempt: Preempt = "micro_batch"
    """``micro_batch``: look at the clock between micro-batches. ``backward``: also
    leave a running backward, from a gradient hook."""
    partial: Partial = "keep"
    """With ``backward``: ``keep`` the gradients that the unfinished micro-batch has
    given, each normalised by what it received, or ``discard`` them."""
    normalize: Normalize = "computed"
    """Divide the sum of gradients by what was ``computed``, by what was ``planned``
    (Algorithm 1), or by ``computed`` times 1 - the average dropped share
    (``constant``). The last two equal a smaller learning rate."""
    compensate: Compensate | None = None
    """How dropped samples are made up for: they come back (``resample``), training
    lasts longer (``extra_steps``), or more micro-batches are planned (``batch``)."""

    def __post_init__(self) -> None:
        require(
            self.threshold_s == "auto" or _is_positive(self.threshold_s),
            "threshold_s is 'auto' or a positive number of seconds, not "
            f"{self.threshold_s!r}",
        )
        require(
            0.0 <= self.max_drop <= 1.0,
            f"max_drop is a share in [0, 1], not {self.max_drop}",
        )
        for name, value, least in (
            ("calibration_steps", self.calibration_steps, 1),
            ("warmup_steps", self.warmup_steps, 0),
            ("retune_every", self.retune_every, 1),
        ):
            require(
                isinstance(value, int) and value >= least,
                f"{name} is {least} or more steps, not {value}",
            )
        _check_choices(
            ("preempt", self.preempt, ("micro_batch", "backward")),
            ("partial", self.partial, ("keep", "discard")),
            ("normalize", self.normalize, ("computed", "planned", "constant")),
        )
        if self.compensate is not None:
            _check_choices(
                ("compensate", self.compensate, ("resample", "extra_steps", "batch"))
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBound:
    """How much of a gradient may be missing when a round closes, and when.

    ``p_low`` holds in the critical regime, ``p_high`` outside. Equal values are a
    fixed bound (MLT); both zero is reliable delivery.

    Source: DBLP (Accordion for eta, MLT for a fixed bound); spec N8, N9.
    """

    p_low: float = 0.008
    """Share in [0, 1) in the critical regime. 0.8 %: EfficientNetB0 in DBLP and MLT."""
    p_high: float = 0.408
    """Share in [p_low, 1) outside it. 40 points more, as in DBLP."""
    eta: float = 0.5
    """Relative change of the gradient norm that is critical (Accordion's value)."""
    frequency: int = 10
    """Rounds between two checks, and how long a critical verdict holds."""
    test: Test = "change"
    """``change``: |prev - curr| / prev >= eta. ``drop``: only a falling norm counts."""
    compare: Compare = "step"
    """Compare with the norm of the previous ``step`` or of the last ``check``."""
    window: int = 1
    """Rounds whose norms are averaged before they are compared; 1 is the paper."""
    lr_rule: bool = False
    """A round at which the learning rate fell is critical (Accordion)."""
    per_layer: bool = False
    """Compare each tensor's norm; the largest relative change decides."""
    correct_holes: bool = True
    """Divide the norm by sqrt(share received), docs/design/0007; never with
    ``holes="residual"``, where what is lost comes later (0026)."""
    holes: Holes = "zero"
    """A missing chunk is ``zero`` (the paper), the mean of what arrived
    (``received_mean``), or zero now and part of its sender's next gradient
    (``residual``; a restart forgets it). Evidence: docs/holes.md."""
    residual_momentum: float = 0.0
    """With ``residual``: momentum in [0, 1) that each sender applies to its gradient
    before it leaves, so that what comes late has it too; the optimizer must have none
    (Deep Gradient Compression). 0: the optimizer's own momentum, as ever."""
    p_back: float = 0.0
    """Share in [0, 1) of a mean that a rank may miss on the way back; 0 is exact (the
    paper). What it missed comes with its next mean, so that replicas differ by little
    in between (0033). In the sharded plan, with ``attach``."""
    resync_every: int = 100
    """With ``p_back``: steps after which parameters are made equal again, each as its
    owner has it. ``StepReport.drift`` tells how far apart they were."""
    order: Order = "rotate"
    """Which chunks leave first: another start each round, always the same, or the
    largest norm first. The last to leave are the first to be given up."""
    repair: Repairing = "plain"
    """``plain``: a pass over what is missing sends each chunk once (the paper).
    ``burst``: while much more is lost than a link usually loses, several times, so that
    fewer round trips end the round; at most 1.5 times the bytes (0035)."""
    deadline_s: float | Literal["auto"] | None = None
    """Seconds after a gradient's first sign at which its owner takes what is there,
    even if more than p is missing. None: it waits. ``auto``: learned from arrival
    times, and never for a bound of 0. ``RoundReport.given_up`` tells what it cost."""
    deadline_k: float = 4.0
    """With ``auto``: deviations above the median. At 4 normal jitter is never cut;
    where 1 % of rounds take three medians and more, 1.8 % are."""
    deadline_cap_s: float = 5.0
    """With ``auto``: never later than this. As long as ``Transport.silence_s``: who
    waits longer for a gradient no longer calls it a tail."""

    def __post_init__(self) -> None:
        require(
            0.0 <= self.p_low < 1.0 and math.isfinite(self.p_low),
            f"p_low is a share in [0, 1), not {self.p_low}",
        )
        require(
            self.p_low <= self.p_high < 1.0,
            f"p_high is a share in [p_low={self.p_low}, 1), not {self.p_high}",
        )
        require(
            self.eta > 0.0 and math.isfinite(self.eta),
            f"eta is a positive relative change, not {self.eta}",
        )
        require(
            self.frequency >= 1, f"frequency is 1 or more rounds, not {self.frequency}"
        )
        require(self.window >= 1, f"window is 1 or more rounds, not {self.window}")
        _check_choices(
            ("test", self.test, ("change", "drop")),
            ("compare", self.compare, ("step", "check")),
            ("holes", self.holes, ("zero", "received_mean", "residual")),
            ("order", self.order, ("rotate", "fixed", "norm")),
            ("repair", self.repair, ("plain", "burst")),
        )
        require(
            0.0 <= self.residual_momentum < 1.0,
            f"residual_momentum is in [0, 1), not {self.residual_momentum}",
        )
        require(
            self.residual_momentum == 0.0 or self.holes == "residual",
            f"residual_momentum={self.residual_momentum} needs holes='residual', "
            f"not {self.holes!r}",
        )
        require(
            0.0 <= self.p_back < 1.0, f"p_back is a share in [0, 1), not {self.p_back}"
        )
        require(
            self.resync_every >= 1,
            f"resync_every is 1 or more steps, not {self.resync_every}",
        )
        self._check_deadline()

    def _check_deadline(self) -> None:
        require(
            self.deadline_s in (None, "auto") or _is_positive(self.deadline_s),
            "deadline_s is None, 'auto' or a positive number of seconds, not "
            f"{self.deadline_s!r}",
        )
        for name, value in (
            ("deadline_k", self.deadline_k),
            ("deadline_cap_s", self.deadline_cap_s),
        ):
            require(_is_positive(value), f"{name} is a positive number, not {value!r}")
        require(
            self.deadline_s != "auto" or self.p_high > 0.0,
            "deadline_s='auto' cuts no exact bound, and p_high is 0: give seconds",
        )

    @property
    def corrects_norms(self) -> bool:
        """True if holes make the mean's norm smaller and it is to be corrected.

        With a residual, energy that is lost in one round comes in a later one.
        """
        return self.correct_holes and self.holes != "residual"

    @property
    def is_fixed(self) -> bool:
        """True if both regimes have the same bound (MLT's policy)."""
        return self.p_low == self.p_high

    @classmethod
    def fixed(cls, p: float) -> "LossBound":
        """MLT's policy: one bound for the whole training. Source: spec N9."""
        return cls(p_low=p, p_high=p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """A rank's own certificate, and who must have signed the others'. Files, PEM."""

    cert: str
    """Certificate of this rank, with the intermediate ones if there are any."""
    key: str
    """Its private key, without a passphrase."""
    ca: str
    """Authorities: a peer whose certificate none of them signed gets nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How bytes travel between the ranks. The defaults fit one Ethernet segment."""

    plan: Plan = "sharded"
    """Who reduces what. ``sharded``: every rank its part of each bucket. ``server``:
    one server for all workers (the paper's)."""
    server: str | None = None
    """``host:port`` of a running ``tailbound serve``, for ``plan="server"``. None:
    rank 0 runs the server and publishes its address through the job's store."""
    mtu: int | Literal["auto"] = "auto"
    """Bytes of one IP packet. ``auto``: of the route to the peer, at most 9000, and
    the smallest of all ranks."""
    bind: str | None = None
    """Local address or interface name. None: the address on the route to the peer."""
    port_range: tuple[int, int] | None = None
    """First and last port that this process may bind. None: the kernel chooses."""
    timeout_s: float = 60.0
    """Longest wait for a peer, in every phase, in seconds."""
    silence_s: float = 5.0
    """A sender whose repairs bring no new chunk for this long calls UDP dead."""
    secret: str | None = field(default=None, repr=False)
    """What every process of the job must prove that it knows, 16 characters or more,
    before a word of it is heard. None: the environment's ``TAILBOUND_SECRET``, if set,
    where ranks meet. See docs/security.md."""
    security: Security = "session"
    """``authenticated``: control over TLS 1.3, and no datagram counts that the peer did
    not seal. ``encrypted``: nor can anybody else read them. Both need a secret or
    ``certificates``, and the extra ``tailbound[security]``. See docs/security.md."""
    certificates: Certificates | None = None
    """For the upper two levels: the job's own instead of ones made at the start."""
    impairments: Impairments | None = None
    """Loss and delay added to what this process receives; for tests and the lab."""

    def __post_init__(self) -> None:
        _check_choices(
            ("plan", self.plan, ("sharded", "server")),
            ("security", self.security, ("session", "authenticated", "encrypted")),
        )
        require(
            self.certificates is None or self.security != "session",
            "certificates need security='authenticated' or 'encrypted', not 'session'",
        )
        require(
            self.secret is None or len(self.secret) >= MIN_SECRET,
            f"a secret has {MIN_SECRET} characters or more; make one with "
            "`python -c 'import secrets; print(secrets.token_hex())'`",
        )
        require(
            self.server is None or self.plan == "server",
            f'server={self.server!r} needs plan="server"',
        )
        require(
            self.mtu == "auto"
            or (isinstance(self.mtu, int) and 576 <= self.mtu <= 65535),
            f"mtu is 'auto' or 576 to 65535 bytes, not {self.mtu!r}",
        )
        require(
            self.mtu == "auto" or self.mtu >= MIN_SEALED_MTU or not self.is_sealed,
            f"mtu is {MIN_SEALED_MTU} bytes or more with security={self.security!r}, "
            f"not {self.mtu!r}",
        )
        require(
            self.timeout_s > 0.0 and math.isfinite(self.timeout_s),
            f"timeout_s is a positive number of seconds, not {self.timeout_s}",
        )
        require(
            self.silence_s > 0.0 and math.isfinite(self.silence_s),
            f"silence_s is a positive number of seconds, not {self.silence_s}",
        )
        if self.server is not None:
            parse_address(self.server)
        if self.port_range is not None:
            first, last = self.port_range
            require(
                1 <= first <= last <= 65535,
                f"port_range is (first, last) within 1 to 65535, not {self.port_range}",
            )

    @property
    def is_sealed(self) -> bool:
        """Datagrams carry a tag, and control messages go through TLS."""
        return self.security != "session"

    def require_credentials(self) -> None:
        """Check that ranks can prove who they are, if they have to.

        Raises:
            ConfigError: neither a secret nor certificates.
        """
        require(
            not self.is_sealed or self.secret is not None or bool(self.certificates),
            f"security={self.security!r} needs a secret or certificates: set "
            "TAILBOUND_SECRET on every rank, or Transport(certificates=...)",
        )


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``.

    Raises:
        ConfigError: the text is not of that form, or the port not in 0 to 65535.
    """
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    require(
        bool(separator and host)
        and (bracketed or ":" not in host)
        and port.isdecimal()
        and int(port) <= 65535,
        f"an address is host:port or [ipv6]:port, not {text!r}",
    )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Join host and port; an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
