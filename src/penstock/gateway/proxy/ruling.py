"""Decision of rules about a request, in words for its client and its log line, and tallies of what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from penstock.gateway.records.device_time import DeviceTime
from penstock.gateway.records.token_usage import TokenUsage
from penstock.observe import gateway_catalog as catalog
from penstock.observe.registry import Counter, Registry
from penstock.router.rules import DEFAULT, RuleSet, Verdict
from penstock.tenancy.prices import FREE, NANOS, Price

HEADER = b"x-penstock-rule"


class Ruling(NamedTuple):
    model: str  # the one with the rules
    verdict: Verdict  # in a dry run, what it would have been
    dry_run: bool
    default: str  # and the pools that this request falls to there
    default_pool: str
    pool: str

    def __str__(self) -> str:
        return f"{DEFAULT}->{self.default};would={self.verdict}" if self.dry_run else str(self.verdict)

    @property
    def header(self) -> bytes:
        return b"%b: %b\r\n" % (HEADER, str(self).encode("ascii", "replace"))


class _Counts(NamedTuple):
    requests: Counter
    input: Counter
    output: Counter
    saved: Counter


class RuleTally:
    """Tallies by rule: requests, tokens, and the money saved as against the default, or that a dry run would save."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._counts: dict[tuple[str, str], _Counts] = {}

    def ended(
        self, ruling: Ruling, pool: str, usage: TokenUsage | None, prices: Mapping[str, Price], times: DeviceTime
    ) -> None:
        """`pool`: the one that answered; `times`: what the other would have taken."""
        counts = self._of(ruling.model, ruling.verdict.rule, ruling.verdict.to, ruling.dry_run)
        counts.requests.value += 1
        if usage is not None:
            counts.input.value += usage.input_tokens
            counts.output.value += usage.output_tokens
            chosen = ruling.pool if ruling.dry_run else pool
            by_default, by_rule = (
                (usage if one == pool else replace(usage, work=times.estimate(one, usage))).nanos(prices.get(one, FREE))
                for one in (ruling.default_pool, chosen)
            )
            counts.saved.value += (by_default - by_rule) / NANOS

    def document(self, model: str, rules: RuleSet) -> dict[str, object]:
        pairs = [(rule.name, rule.to) for rule in rules.rules] + [(DEFAULT, rules.default)]
        rows = []
        for name, to in pairs:
            counts = self._of(model, name, to, rules.dry_run)
            rows.append(
                {
                    "rule": name,
                    "to": to,
                    "requests": counts.requests.value,
                    "input_tokens": counts.input.value,
                    "output_tokens": counts.output.value,
                    "saved": round(counts.saved.value, 9),
                }
            )
        total = sum(counts.saved.value for key, counts in self._counts.items() if key[0] == model)
        return {"model": model, "dry_run": rules.dry_run, "rules": rows, "saved": round(total, 9)}

    def _of(self, model: str, rule: str, to: str, dry_run: bool) -> _Counts:
        found = self._counts.get((model, rule))
        if found is None:
            count = self._registry.count
            found = self._counts[model, rule] = _Counts(
                count(catalog.RULES, model, rule, to, "dry_run" if dry_run else "live"),
                count(catalog.RULE_TOKENS, model, rule, "input"),
                count(catalog.RULE_TOKENS, model, rule, "output"),
                count(catalog.RULE_SAVINGS, model, rule),
            )
        return found
