"""One engine under a steady load: how long its steps are, how many sequences it holds, how long a request waits.

Batching: a step serves all that decode, so that their number B, and with it the step, follows from the rate by Little's
law; prompts take their time out of the same device. Both together have a closed form.

Waiting: prompts are computed one after the other, an M/G/1 queue whose server is slowed by the decodes that each chunk
carries along. Its mean wait is Pollaczek and Khinchine's, its tail exponential.

Fluctuation: at percentile p a request meets B + z sqrt(B) others: arrivals are Poisson's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from penstock.capacity.demand import Profile, Target

MAX_UTILISATION = 0.9  # of the device's time; beyond it no queue is short, and these formulas flatter


class Coefficients(Protocol):
    """Seconds of a step's parts: `StepCost`'s, reckoned from a datasheet, or those learned of a replica."""

    @property
    def fixed_s(self) -> float: ...
    @property
    def read_s(self) -> float: ...
    @property
    def linear_token_s(self) -> float: ...
    @property
    def head_token_s(self) -> float: ...
    @property
    def token_s(self) -> float: ...
    @property
    def pair_s(self) -> float: ...
    @property
    def kv_token_s(self) -> float: ...
    @property
    def sequence_s(self) -> float: ...


@dataclass(frozen=True)
class Limits:
    kv_tokens: int
    max_num_seqs: int = 256
    chunk_tokens: int = 8192


@dataclass(frozen=True)
class Expected:
    """Figures of one engine's clients at a rate. Seconds; `p` is the target's percentile. TPOT None: one token only."""

    utilisation: float
    num_decodes: float
    ttft_p50_s: float
    ttft_p_s: float
    tpot_p50_s: float | None
    tpot_p_s: float | None


class Engine:
    def __init__(self, cost: Coefficients, profile: Profile, limits: Limits, target: Target) -> None:
        self._cost, self._profile, self._limits, self._target = cost, profile, limits, target
        token_s = cost.linear_token_s + cost.token_s
        self._prompts = [  # share, seconds, steps
            (
                each.share,
                each.tokens * token_s + each.pairs * cost.pair_s,
                math.ceil(each.tokens / limits.chunk_tokens),
            )
            for each in profile.prompts
        ]
        self._prefill_s = profile.prefill_tokens * token_s + profile.prefill_pairs * cost.pair_s
        self._prefill_s2 = sum(share * seconds * seconds for share, seconds, _ in self._prompts)
        self._chunk_s = self._prefill_s * limits.chunk_tokens / profile.prefill_tokens
        # Of a decode: what can hide behind the reading of weights, and what cannot.
        self._product_s = cost.linear_token_s + cost.head_token_s
        self._decode_s = cost.sequence_s + cost.token_s + profile.context * cost.kv_token_s
        self._is_bounded = target.ttft_s is not None or target.tpot_s is not None
        self._z = NormalDist().inv_cdf(target.percentile) if self._is_bounded else 0.0
        # Requests a second that no engine of this kind gets beyond.
        self.saturation = 1 / (self._prefill_s + profile.decodes * (self._decode_s + self._product_s))

    def max_rate(self) -> tuple[float, str]:
        """The most requests a second that keep the target, and what stands against more; (0, why) if none do."""
        low, high = 0.0, self.saturation * MAX_UTILISATION
        if (reason := self.obstacle(high * 1e-6)) is not None:
            return 0.0, reason
        if self.obstacle(high) is None:
            return high, "utilisation"
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.obstacle(middle) is None else (low, middle)
        return low, self.obstacle(high) or "utilisation"

    def obstacle(self, rate: float) -> str | None:
        """Returns what does not hold at this rate: "ttft", "tpot", "kv memory" or "sequences"; None: all holds."""
        met = self._met(rate, self._z)
        if met * self._profile.context + self._profile.longest > self._limits.kv_tokens:
            return "kv memory"
        if met > self._limits.max_num_seqs:
            return "sequences"
        target = self._target
        if target.tpot_s is not None and self._profile.decodes and self._busy_step_s(rate, self._z) > target.tpot_s:
            return "tpot"
        if target.ttft_s is not None and self._late(rate, self._z)(target.ttft_s) > 1 - target.percentile:
            return "ttft"
        return None

    def expected(self, rate: float) -> Expected:
        decodes = self._profile.decodes > 0
        return Expected(
            utilisation=rate / self.saturation,
            num_decodes=self._num_decodes(rate),
            ttft_p50_s=self._ttft(rate, 0.5, 0.0),
            ttft_p_s=self._ttft(rate, self._target.percentile, self._z),
            tpot_p50_s=self._step_s(rate) if decodes else None,
            tpot_p_s=self._busy_step_s(rate, self._z) if decodes else None,
        )

    def _step_s(self, rate: float) -> float:
        """Mean time between two tokens of a sequence, the chunks of prompts in between counted in.

        step = (fixed + max(weights read, B products) + B decodes) / (share of time not taken by prompts), with
        B = rate x decodes x step: the larger of two linear equations' solutions.
        """
        cost, decodes = self._cost, self._profile.decodes
        free = 1 - rate * (self._prefill_s + decodes * self._decode_s)
        free_of_products = free - rate * decodes * self._product_s
        if free_of_products <= 0:
            return math.inf
        return max((cost.fixed_s + cost.read_s) / free, cost.fixed_s / free_of_products)

    def _num_decodes(self, rate: float) -> float:
        return rate * self._profile.decodes * self._step_s(rate) if self._profile.decodes else 0.0

    def _met(self, rate: float, z: float) -> float:
        mean = self._num_decodes(rate)
        return mean + z * math.sqrt(mean) if mean < math.inf else mean

    def _busy_step_s(self, rate: float, z: float) -> float:
        """Returns a step's seconds as `_step_s`, over a life that meets more sequences and prompts than most.

        life = steps + work of the prompts that come meanwhile, its mean and z deviations: a quadratic equation.
        """
        free = 1 - rate * self._prefill_s
        bare_s = self._bare_step_s(self._met(rate, z))
        if free <= 0 or bare_s == math.inf:
            return math.inf
        steps = max(1.0, self._profile.decodes)
        spread = z * math.sqrt(rate * self._prefill_s2)
        root = (spread + math.sqrt(spread * spread + 4 * free * steps * bare_s)) / (2 * free)
        return root * root / steps

    def _bare_step_s(self, num_decodes: float) -> float:
        """Returns the seconds of a step without any prompt in it."""
        cost = self._cost
        return cost.fixed_s + max(cost.read_s, num_decodes * self._product_s) + num_decodes * self._decode_s

    def _late(self, rate: float, z: float) -> Callable[[float], float]:
        """The share of requests whose first token comes later than a limit in seconds.

        Wait for the queue, for the step under way, and for the steps that carry the prompt, with all that decodes.
        """
        bare_s, under_way_s = self._bare_step_s(self._met(rate, z)), self._busy_step_s(rate, z)
        slowed = 1 + bare_s / self._chunk_s
        busy = rate * self._prefill_s * slowed
        if not busy < 1:
            return lambda limit_s: 1.0
        mean_wait_s = rate * self._prefill_s2 * slowed * slowed / (2 * (1 - busy))
        decay = busy / mean_wait_s if mean_wait_s else 0.0  # nobody waits where nobody comes
        unqueued = [(share, under_way_s + seconds + num_steps * bare_s) for share, seconds, num_steps in self._prompts]

        def late(limit_s: float) -> float:
            return sum(
                share * (1.0 if limit_s < least_s else busy * math.exp((least_s - limit_s) * decay))
                for share, least_s in unqueued
            )

        return late

    def _ttft(self, rate: float, percentile: float, z: float) -> float:
        low, high = 0.0, 1.0
        late = self._late(rate, z)
        while late(high) > 1 - percentile:
            low, high = high, 2 * high
            if high > 1e6:
                return math.inf
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if late(middle) > 1 - percentile else (low, middle)
        return high
