"""Rules that name a model by what a request is like: the first that fires, and if none does the default is taken.

Only the last words of its user are seen here of a request's text, and only where a rule asks for them. A new kind of
condition is a function from a rule to a test, or None where the rule does not speak of it, and a line in `_CONDITIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from penstock.core.errors import ConfigError

Tokens = Annotated[int, Meta(ge=0)]
Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=200)]

DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it goes into headers and labels


class Facts(Struct, frozen=True, dict=True):
    """Facts about a request that rules and scoring functions are told."""

    prompt_tokens: int = 0  # counted where that makes a difference and can be done, else estimated
    max_tokens: int | None = None  # the output limit, if the client set one
    num_messages: int = 0
    num_tools: int = 0
    response_format: str = ""  # json_object, json_schema; empty: free text
    task: str = ""  # as the client calls it
    text: str = ""  # of the last message of the user; of a long one its beginning and its end

    @cached_property
    def folded(self) -> str:
        return self.text.casefold()


Test = Callable[[Facts], bool]
Score = Callable[[Facts], float]


@dataclass(frozen=True)
class Rule:
    """It fires when everything that it says holds."""

    to: str  # a model, or one version of it
    name: str = ""  # in the header, the log and the metrics; auto: rule1, rule2, …
    min_prompt_tokens: Tokens | None = None
    max_prompt_tokens: Tokens | None = None
    tools: bool | None = None  # whether the request brings tools
    response_format: list[str] = field(default_factory=list)  # one of these; text: none is asked for
    tasks: list[str] = field(default_factory=list)  # one of these, in x-penstock-task or metadata
    keywords: Words = field(default_factory=list)  # one of these in the user's last message, as whole words
    score: str | None = None  # package.module:function, given the facts
    min_score: float | None = None
    max_score: float | None = None


class Verdict(NamedTuple):
    rule: str
    to: str
    failed: tuple[str, ...] = ()  # rules whose scoring function raised: they did not fire

    def __str__(self) -> str:
        return f"{self.rule}->{self.to}"


class RuleSet:
    """Immutable. `scores`: the functions by the names that rules have for them."""

    def __init__(
        self, rules: list[Rule], default: str, *, dry_run: bool = False, scores: Mapping[str, Score] | None = None
    ) -> None:
        """`dry_run`: all go to the default, and it is only noted where they would have gone."""
        self.rules = [_named(rule, number) for number, rule in enumerate(rules, start=1)]
        self.default = default
        self.dry_run = dry_run
        self._tests = [(rule, _tests(rule, scores or {})) for rule in self.rules]
        names = [rule.name for rule in self.rules]
        if len({DEFAULT, *names}) <= len(names):
            raise ConfigError(f"two rules have the same name, or one is called {DEFAULT}", param="rules")
        self.needs_text = any(rule.keywords or rule.score for rule in rules)
        self.needs_body = self.needs_text or any(
            rule.tools is not None or rule.response_format or rule.tasks for rule in rules
        )
        # Between which prompt sizes something changes; a scoring function may look at any.
        bounds = [rule.min_prompt_tokens for rule in rules] + [rule.max_prompt_tokens for rule in rules]
        self.bounds = sorted({bound for bound in bounds if bound is not None} | {0 for rule in rules if rule.score})

    @property
    def targets(self) -> set[str]:
        return {self.default, *(rule.to for rule in self.rules)}

    def decide(self, facts: Facts, allowed: Container[str]) -> Verdict:
        """One outcome for every request. Rules that lead where the tenant may not go are passed over."""
        failed: tuple[str, ...] = ()
        for rule, tests in self._tests:
            if rule.to.partition("@")[0] in allowed:
                try:
                    if all(test(facts) for test in tests):
                        return Verdict(rule.name, rule.to, failed)
                except Exception:  # a scoring function is foreign code and may raise anything
                    failed += (rule.name,)
        return Verdict(DEFAULT, self.default, failed)


def _named(rule: Rule, number: int) -> Rule:
    named = rule if rule.name else replace(rule, name=f"rule{number}")
    if not _NAME.fullmatch(named.name):
        raise ConfigError(f"a rule's name is of letters, digits, . _ -, and not '{named.name}'", param="rules")
    return named


def _tests(rule: Rule, scores: Mapping[str, Score]) -> list[Test]:
    found = [test for condition in _CONDITIONS if (test := condition(rule)) is not None]
    if rule.score is not None:
        found.append(_scored(rule, scores[rule.score]))  # last: it may take the longest
    elif rule.min_score is not None or rule.max_score is not None:
        raise ConfigError(f"rule '{rule.name}' has a bound and no `score`", param="rules")
    if not found:
        raise ConfigError(f"rule '{rule.name}' has no condition; what is meant for all is the default", param="rules")
    return found


# -- conditions


def _size(rule: Rule) -> Test | None:
    least, most = rule.min_prompt_tokens, rule.max_prompt_tokens
    if least is None and most is None:
        return None
    return lambda facts: (
        (least is None or facts.prompt_tokens >= least) and (most is None or facts.prompt_tokens <= most)
    )


def _tools(rule: Rule) -> Test | None:
    wanted = rule.tools
    return None if wanted is None else lambda facts: (facts.num_tools > 0) is wanted


def _response_format(rule: Rule) -> Test | None:
    wanted = frozenset("" if kind == "text" else kind for kind in rule.response_format)
    return (lambda facts: facts.response_format in wanted) if wanted else None


def _task(rule: Rule) -> Test | None:
    wanted = frozenset(task.casefold() for task in rule.tasks)
    return (lambda facts: facts.task.casefold() in wanted) if wanted else None


def _keywords(rule: Rule) -> Test | None:
    """Returns a test for whole words. A search is fast; only a word found is looked at for its beginning and end."""
    words = [(word, re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")) for word in map(str.casefold, rule.keywords)]
    if not words:
        return None
    return lambda facts: any(word in facts.folded and whole.search(facts.folded) for word, whole in words)


def _scored(rule: Rule, score: Score) -> Test:
    least, most = rule.min_score, rule.max_score
    if least is None and most is None:
        raise ConfigError(f"rule '{rule.name}' has a score and neither min_score nor max_score", param="rules")

    def test(facts: Facts) -> bool:
        value = score(facts)
        return (least is None or value >= least) and (most is None or value <= most)

    return test


_CONDITIONS: tuple[Callable[[Rule], Test | None], ...] = (_size, _tools, _response_format, _task, _keywords)
