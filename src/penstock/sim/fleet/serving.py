"""The fluid model of a pool: a queue of prompts and a number of decodes, spread evenly over the active replicas.

A replica is the simulator's `Profile`: its step's roofline, its chunk size, its places. In steps that are full of
prompts a replica completes so many of them a second; fewer come through where no place is free for their decodes. A
step's time is everybody's time per token, and outputs are geometrically distributed, so that decodes end at a rate.
Prompts are exponentially distributed: one that is longer than a chunk is the later for it, however idle its replica.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.sim.profile import Profile

_STEPS_TO_FIRST = 5.0  # steps of a first token that does not wait: the one under way, its own, one ahead of both
_GATEWAY_QUEUE = 512  # requests that a gateway lets wait; see `admission.settings`
_P95 = 0.95
_TPOT_BLUR = 0.1  # of the TPOT objective: around it, the share of requests that keep it falls from one to nothing


class Work(NamedTuple):
    """A mean request on one replica. Seconds of a device."""

    prompt_tokens: float
    output_tokens: float
    pairs_s: float  # attention of its prompt
    decode_s: float  # of one decode, besides its products
    rate: float  # requests/s of a replica with a queue, decodes and prompts in balance


class Tick(NamedTuple):
    """The outcome of a second."""

    in_slo: float  # requests
    shed: float
    started: float  # requests whose prompts were computed
    ttft_s: float  # of one that comes at the end of it
    step_s: float
    rest_p95_s: float = 0.0  # what a long prompt adds to its TTFT by itself


class _Rest(NamedTuple):
    """Time of a prompt beyond that of one step, where prompts are exponentially distributed."""

    share: float  # of prompts that take longer
    mean_s: float  # of those

    def share_over(self, seconds: float) -> float:
        return self.share * math.exp(-seconds / self.mean_s)

    def quantile_s(self, quantile: float) -> float:
        return max(0.0, self.mean_s * math.log(max(1e-9, self.share) / (1 - quantile)))


class Serving:
    """One pool's requests. `queued` and `decoding` are numbers of requests; `tick` moves them by a second."""

    def __init__(self, profile: Profile, slo: Slo) -> None:
        if profile.stages > 1:
            raise ConfigError(f"{profile.name} is a pipeline, and pools of those are not simulated", param="profile")
        self.profile, self.slo = profile, slo
        self.queued = 0.0
        self.prefilling = 0.0  # requests between the queue and their first token
        self.decoding = 0.0
        self.step_s = profile.cost.step_s + profile.cost.weights_s
        self.life_s = 1.0  # of a decode
        self._mean_step_s = self.step_s
        self._paced_s = 0.5 * (slo.tpot_s or math.inf)  # the engine's budget counts the step before with it
        self._floor = max(profile.block_tokens, profile.chunk_tokens // 8)
        self.work = cache(self._work)

    def _work(self, prompt_tokens: float, output_tokens: float) -> Work:
        cost = self.profile.cost
        # Prompts are exponentially distributed: the mean of their squares is twice the square of the mean.
        pairs_s = prompt_tokens * (prompt_tokens * cost.pair_s + cost.exchange_s)  # what no reading hides
        context = prompt_tokens + output_tokens  # an output is met in the midst of one twice as long
        decode_s = cost.sequence_s + cost.head_s + cost.exchange_s + context * cost.context_s
        work = Work(prompt_tokens, output_tokens, pairs_s, decode_s, 0.0)
        places, decodes = float(self.profile.max_sequences), 0.0
        for _ in range(30):
            tokens, step_s = self._full_step(work, decodes)
            decodes += 0.5 * (min(places, tokens / prompt_tokens * output_tokens) - decodes)
        prompt_s = prompt_tokens * cost.token_s + pairs_s
        reading_s = max(cost.weights_s, places * cost.token_s)
        all_taken_s = cost.step_s + reading_s + places * (decode_s + prompt_s / output_tokens)
        return work._replace(rate=min(tokens / prompt_tokens / step_s, places / output_tokens / all_taken_s))

    def _full_step(self, work: Work, decodes: float) -> tuple[float, float]:
        """Prompt tokens in a step that has enough of them, and its seconds."""
        cost = self.profile.cost
        bare_s = cost.step_s + decodes * (work.decode_s + cost.token_s)
        token_s = cost.token_s + work.pairs_s / work.prompt_tokens
        tokens = min(float(self.profile.chunk_tokens), max(self._floor, (self._paced_s - bare_s) / token_s))
        reading_s = max(0.0, cost.weights_s - (decodes + tokens) * cost.token_s)
        return tokens, bare_s + reading_s + tokens * token_s

    def tick(self, arrivals: float, prompt_tokens: float, output_tokens: float, num_active: int) -> Tick:
        if not num_active:
            return self._hold(arrivals)
        work, cost = self.work(prompt_tokens, output_tokens), self.profile.cost
        queued, decoding = self.queued, self.decoding
        free = num_active * self.profile.max_sequences - decoding
        mean_decoding = decoding
        for _ in range(2):  # decodes during the second, by the step's time, by decodes
            decodes = mean_decoding / num_active
            tokens, full_s = self._full_step(work, decodes)
            speed = num_active * tokens / prompt_tokens / full_s
            ending = decoding / (output_tokens * self.step_s)
            started = min(queued + arrivals, speed, max(0.0, free + ending))
            prompts_s = started / num_active * (prompt_tokens * cost.token_s + work.pairs_s)
            # Half of the steps with prompts in them are long enough to hide the reading of weights.
            bare_s = cost.step_s + decodes * (work.decode_s + cost.token_s)
            reading_s = max(0.0, cost.weights_s - decodes * cost.token_s)
            step_s = (bare_s + reading_s * (1 - prompts_s / 2)) / max(0.05, 1 - prompts_s)
            self.step_s = step_s = min(step_s, full_s)
            self.life_s = life_s = max(1e-3, output_tokens * step_s)
            left = math.exp(-1 / life_s)
            mean_decoding = started * life_s + (decoding - started * life_s) * life_s * (1 - left)
        if free + ending < speed:
            speed = max(1e-9, free + ending)
        self.decoding = started * life_s + (decoding - started * life_s) * left
        self._mean_step_s += (step_s - self._mean_step_s) * -math.expm1(-1 / max(1.0, life_s))
        self.queued = queued + arrivals - started
        most = _GATEWAY_QUEUE + num_active * self.profile.max_sequences
        shed = max(0.0, self.queued - most)
        self.queued -= shed
        first_s = _STEPS_TO_FIRST * step_s
        self.prefilling = started * first_s
        rest = _Rest(math.exp(-step_s / full_s * tokens / prompt_tokens), prompt_tokens / tokens * full_s)
        in_time = self._in_time(queued / speed, self.queued / speed, self.slo.ttft_s - first_s, rest)
        kept = arrivals * in_time * self._tpot_share()
        in_slo = min(kept, arrivals - shed) if shed < arrivals else 0.0
        return Tick(in_slo, shed, started, first_s + self.queued / speed, step_s, rest.quantile_s(_P95))

    def _hold(self, arrivals: float) -> Tick:
        self.queued += arrivals
        self.prefilling = self.decoding = 0.0
        shed = max(0.0, self.queued - 16 * _GATEWAY_QUEUE)
        self.queued -= shed
        return Tick(0.0, shed, 0.0, 2 * self.slo.ttft_s if self.queued else 0.0, self.step_s)

    def _tpot_share(self) -> float:
        if self.slo.tpot_s is None:
            return 1.0
        over = self._mean_step_s / self.slo.tpot_s - 1
        return min(1.0, max(0.0, 0.5 - over / (2 * _TPOT_BLUR)))

    @staticmethod
    def _in_time(first_s: float, last_s: float, most_s: float, rest: _Rest) -> float:
        """Share of a second's arrivals whose wait and whose own prompt take at most so long. Waits grow or shrink
        evenly from the first's to the last's."""
        slack_s = sorted((max(0.0, most_s - first_s), max(0.0, most_s - last_s)))
        if (spread_s := abs(last_s - first_s)) < 1e-9:
            return 1 - rest.share_over(slack_s[0]) if most_s >= first_s else 0.0
        late_s = rest.mean_s * (rest.share_over(slack_s[0]) - rest.share_over(slack_s[1]))
        return max(0.0, slack_s[1] - slack_s[0] - late_s) / spread_s

    @property
    def in_flight(self) -> float:
        """Requests that wait, whose prompts are computed, and that decode."""
        return self.queued + self.prefilling + self.decoding

    def leave(self, num_active: int) -> float:
        """A replica stops taking requests and takes its decodes with it. Seconds until the last of them has ended."""
        decodes = self.decoding / max(1, num_active)
        self.decoding -= decodes
        return (math.log(decodes + 1) + 0.577) * self.life_s if decodes >= 0.5 else 0.0
