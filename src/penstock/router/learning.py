"""Estimates from past requests: how long a tenant's answers are, how fast a server is that does not say.

Means that forget, in bounded memory. The caller tells them what was; they read no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

_MEMORY = 50  # requests that a mean goes back
_MAX_TENANTS = 10_000  # of each model; then the longest unseen is forgotten
_TRUST = 5  # requests of a tenant's own that count as much as the model's mean
_FIRST_OUTPUT = 256.0


class DecayingMean:
    """The mean of the first requests, then one that forgets: the last `_MEMORY` are two thirds of it."""

    __slots__ = ("count", "value")

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.count = 0

    def add(self, value: float) -> None:
        if self.count < _MEMORY:
            self.count += 1
        self.value += (value - self.value) / self.count


class OutputLengths:
    """The output tokens to expect of a tenant's request to a model."""

    def __init__(self) -> None:
        self._models: dict[str, DecayingMean] = {}
        self._tenants: OrderedDict[tuple[str, str], DecayingMean] = OrderedDict()

    def learn(self, tenant: str, model: str, output_tokens: int) -> None:
        own = self._tenants.get((tenant, model))
        if own is None:
            own = self._tenants[tenant, model] = DecayingMean()
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end((tenant, model))
        own.add(output_tokens)
        of_model = self._models.get(model)
        if of_model is None:
            of_model = self._models[model] = DecayingMean(_FIRST_OUTPUT)
        of_model.add(output_tokens)

    def expected(self, tenant: str, model: str, max_tokens: int, hint: int | None = None) -> int:
        """A hint of the client's counts before what was learnt; neither goes beyond the limit. Never zero."""
        if hint is None:
            of_model = self._models.get(model)
            mean = _FIRST_OUTPUT if of_model is None else of_model.value
            own = self._tenants.get((tenant, model))
            if own is not None:
                mean += (own.value - mean) * own.count / (own.count + _TRUST)
            hint = round(mean)
        return max(1, min(hint, max_tokens))


class Observed(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: float  # of one sequence


class ObservedSpeeds:
    """The speeds of servers that do not say them: tokens of prompts per second until the first byte, of output per
    second from there. They include what a prompt of the usual length has to wait for there, and its way."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[DecayingMean, DecayingMean, DecayingMean, DecayingMean]] = {}

    def learn(self, replica_id: str, prompt_tokens: int, ttft_s: float, output_tokens: int, decode_s: float) -> None:
        seen = self._seen.get(replica_id)
        if seen is None:
            seen = self._seen[replica_id] = (DecayingMean(), DecayingMean(), DecayingMean(), DecayingMean())
        for mean, value in zip(seen, (prompt_tokens, ttft_s, output_tokens, decode_s), strict=True):
            mean.add(value)

    def forget(self, replica_id: str) -> None:
        self._seen.pop(replica_id, None)

    def of(self, replica_id: str) -> Observed | None:
        seen = self._seen.get(replica_id)
        if seen is None:
            return None
        prompt, ttft_s, output, decode_s = (mean.value for mean in seen)
        return Observed(max(1.0, prompt / max(ttft_s, 1e-3)), max(1.0, output / max(decode_s, 1e-3)))
