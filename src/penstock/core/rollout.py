"""The vocabulary of a rollout: what gateways measure of two versions of a model, as numbers that add up.

A gateway counts in blocks of a few seconds. The blocks of several gateways that cover the same seconds are added cell
by cell; nothing of a single request is kept. The comparison of the versions reads nothing else.

    Arm      whose requests: clients' of the old or the new version, copies for either, or pairs of copies
    Metric   what of them; more is worse, whatever it is
    Cell     count, sum and sum of squares of one metric in one arm and one stratum
    Block    the cells of one gateway and one span of time
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import ceil, exp, floor, log

from msgspec import Struct, field

BLOCK_S = 5.0
BIN = log(1.02)  # width of a histogram's bins: two percent


class Arm(StrEnum):
    OLD = "old"  # requests of clients that the old version answered
    NEW = "new"
    OLD_COPY = "old_copy"  # copies that the old version was sent beside the new one: the control
    NEW_COPY = "new_copy"
    PAIR = "pair"  # a request of which both had a copy: the logarithm of the new version's value over the old one's


class Metric(StrEnum):
    """TIMES are sums of logarithms, all others of the values themselves."""

    TTFT = "ttft"  # seconds
    TPOT = "tpot"  # seconds
    LATENCY = "latency"  # seconds, of whole answers
    OUTPUT_TOKENS = "output_tokens"  # neither more nor less is better
    DEVICE_TIME = "device_time"  # device seconds per token: its inverse is tokens per second and device
    COST = "cost"  # money per token, at the price of the version's replicas
    ERRORS = "errors"  # 1: it failed
    REFUSALS = "refusals"  # 1: the replica refused it
    INVALID_GUIDED = "invalid_guided"  # 1: guided output that its guide does not accept
    INVALID_TOOLS = "invalid_tools"  # 1: a tool call that its schema does not accept
    DISAGREEMENT = "disagreement"  # of a copy with the client's answer: 0 the same, up to 1
    DIVERGENCE = "divergence"  # nats per token between what both think of the same answer
    JUDGED_WORSE = "judged_worse"  # 1: the judge prefers the client's answer, 0.5: neither
    COMPLAINTS = "complaints"  # users' feedback: 1 bad, 0 good


TIMES = frozenset({Metric.TTFT, Metric.TPOT, Metric.LATENCY, Metric.OUTPUT_TOKENS, Metric.DEVICE_TIME, Metric.COST})


class CellKey(Struct, frozen=True, array_like=True):
    """A cell without stratum has all of its metric and arm (and tenant, if it names one); where a metric has strata,
    their cells have the same requests once more. A tenant's requests are in its cells beside those of all tenants: of a
    metric with strata in these alone, so that its sum is the sum of its strata."""

    metric: Metric
    arm: Arm
    stratum: str = ""  # requests that may be compared: alike in what moves the metric, whatever the version
    tenant: str = ""  # empty: all tenants


class Cell(Struct, array_like=True):
    """Moments, and a histogram where quantiles are asked for: cells of times without tenant."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, *, binned: bool = False) -> None:
        """`value`: a logarithm, where the metric is one of TIMES."""
        self.count += 1
        self.total += value
        self.squares += value * value
        if binned:
            place = floor(value / BIN)
            self.bins[place] = self.bins.get(place, 0) + 1

    def merge(self, other: Cell) -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        for place, count in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + count

    @property
    def mean(self) -> float:
        return self.total / self.count

    def quantile(self, q: float) -> float:
        """A quantile of the values whose logarithms were binned, in the middle of a bin; the cell has some."""
        left = max(1, ceil(q * sum(self.bins.values())))
        for place in sorted(self.bins):
            left -= self.bins[place]
            if left <= 0:
                break
        return exp((place + 0.5) * BIN)


class Block(Struct):
    """Cells of one gateway from `at` on, for `seconds`; if they are more than a block has, for a while before as well:
    it could not write."""

    rollout: str  # its id
    step: int  # of its plan: what belongs to an earlier one is not mixed with it
    gateway: str
    at: float  # seconds since 1970; a whole number of blocks
    seconds: float
    cells: list[tuple[CellKey, Cell]]


class RolloutOrder(Struct, frozen=True):
    """A rollout that is on, as gateways have to know it: what to measure, what to copy, and who stays."""

    id: str
    model: str  # the route
    old: str  # versions
    new: str
    step: int
    settle_until: float = 0.0  # requests that began before are not measured: caches are cold, and shares new
    control: bool = True  # the old version is sent a copy of what the new one is sent a copy of
    staying: tuple[str, ...] = ()  # tenants that opted out: the old version answers them
    embedder: str = ""  # the model whose embeddings say how alike two answers are; empty: the same text or not
    judge: str = ""  # the model that is asked which of two answers is better; empty: nobody
    scores: bool = False  # both versions score the same answers, for their divergence
    prices: Mapping[str, float] = field(default_factory=dict)  # of a device-hour, by version
    is_measured: bool = True  # false: nothing is decided by it until somebody says so; who stays does so all the same
    is_held: bool = False  # all clients are at the new version, those that opted out too; the old one is there yet
    is_over: bool = False  # nothing is measured any more
