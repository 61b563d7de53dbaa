from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.router.routes import PoolShare, Route, RouteTable
from penstock.router.rules import DEFAULT, Facts, Rule, RuleSet, Verdict

ALL = {"small", "coder", "big"}
RULES = RuleSet(
    [
        Rule("big", "tools", tools=True),
        Rule("coder", "code", keywords=["Python", "stack trace", "c++"]),
        Rule("big", "structured", response_format=["json_schema"]),
        Rule("small", "summaries", tasks=["summarize"]),
        Rule("small", "short", max_prompt_tokens=500),
        Rule("small", "middle", min_prompt_tokens=501, max_prompt_tokens=1000, response_format=["text"]),
    ],
    default="big",
)
facts = st.builds(
    Facts,
    prompt_tokens=st.integers(0, 3000),
    num_tools=st.integers(0, 2),
    task=st.sampled_from(["", "summarize", "x"]),
    response_format=st.sampled_from(["", "json_object", "json_schema"]),
    text=st.sampled_from(["", "in python", "pythonic", "C++?", "nothing"]),
)


def decided(rules: RuleSet = RULES, allowed: set[str] = ALL, **values: Any) -> str:
    return str(rules.decide(Facts(**values), allowed))


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"prompt_tokens": 500}, "short->small"),
        ({"prompt_tokens": 501}, "middle->small"),
        ({"prompt_tokens": 501, "response_format": "json_object"}, "default->big"),
        ({"prompt_tokens": 1001}, "default->big"),
        ({"prompt_tokens": 5, "num_tools": 1}, "tools->big"),
        ({"prompt_tokens": 5, "response_format": "json_schema"}, "structured->big"),
        ({"prompt_tokens": 9000, "task": "Summarize"}, "summaries->small"),
        ({"text": "Why does my PYTHON script die?"}, "code->coder"),
        ({"text": "here is the stack trace: …"}, "code->coder"),
        ({"text": "I write C++ at night"}, "code->coder"),
        ({"text": "a monty-pythonesque joke"}, "short->small"),
        ({"text": "STRAßE python"}, "code->coder"),
    ],
)
def test_the_first_rule_that_fires_wins(values: dict[str, Any], verdict: str) -> None:
    assert decided(**values) == verdict


@given(facts, st.sets(st.sampled_from(sorted(ALL))))
def test_every_request_has_exactly_one_outcome(facts: Facts, allowed: set[str]) -> None:
    verdict = RULES.decide(facts, allowed)
    firing = [rule for rule in RULES.rules if rule.to in allowed and fires_alone(rule, facts)]
    assert (verdict.rule, verdict.to) == ((firing[0].name, firing[0].to) if firing else (DEFAULT, "big"))
    assert verdict == RULES.decide(facts, allowed)
    assert verdict.rule == DEFAULT or verdict.to in allowed


def fires_alone(rule: Rule, facts: Facts) -> bool:
    return RuleSet([rule], default="none").decide(facts, {rule.to}).rule != DEFAULT


def test_a_rule_that_leads_where_the_tenant_may_not_go_is_passed_over() -> None:
    assert decided(allowed={"small", "big"}, text="python", prompt_tokens=10) == "short->small"
    assert decided(allowed={"big"}, prompt_tokens=10) == "default->big"


def test_a_version_is_allowed_as_its_model_is() -> None:
    rules = RuleSet([Rule("small@v2", max_prompt_tokens=9)], default="big")
    assert decided(rules, prompt_tokens=1) == "rule1->small@v2"


def test_a_scoring_function_is_given_the_facts_and_held_against_its_bound() -> None:
    seen: list[Facts] = []

    def hardness(facts: Facts) -> float:
        seen.append(facts)
        return facts.prompt_tokens / 1000

    rules = RuleSet([Rule("small", "easy", score="m:hardness", max_score=0.5)], "big", scores={"m:hardness": hardness})
    assert decided(rules, prompt_tokens=500) == "easy->small"
    assert decided(rules, prompt_tokens=501) == "default->big"
    assert [one.prompt_tokens for one in seen] == [500, 501]


def test_a_scoring_function_that_fails_does_not_fire_and_is_named() -> None:
    def broken(facts: Facts) -> float:
        raise ZeroDivisionError

    rules = RuleSet(
        [Rule("coder", "odd", score="m:broken", min_score=0), Rule("small", "short", max_prompt_tokens=9)],
        "big",
        scores={"m:broken": broken},
    )
    assert rules.decide(Facts(1), ALL) == Verdict("short", "small", failed=("odd",))


def test_only_what_rules_ask_for_is_needed() -> None:
    by_size = RuleSet([Rule("small", max_prompt_tokens=9)], "big")
    assert (by_size.needs_body, by_size.needs_text, by_size.bounds) == (False, False, [9])
    by_tools = RuleSet([Rule("small", tools=False)], "big")
    assert (by_tools.needs_body, by_tools.needs_text, by_tools.bounds) == (True, False, [])
    assert RuleSet([Rule("small", keywords=["a"])], "big").needs_text


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ([Rule("small")], "no condition"),
        ([Rule("small", "a", tools=True), Rule("big", "a", tools=False)], "same name"),
        ([Rule("small", "default", tools=True)], "called default"),
        ([Rule("small", "a b", tools=True)], "letters"),
        ([Rule("small", score="m:f")], "neither min_score"),
        ([Rule("small", tools=True, min_score=1)], "no `score`"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: list[Rule], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RuleSet(rules, "big", scores={"m:f": lambda facts: 0.0})


def test_rules_lead_to_routes_that_have_none() -> None:
    small, big = Route("small", (PoolShare("small"),)), Route("big", (PoolShare("big"),))
    auto = Route("auto", (), rules=RuleSet([Rule("small", max_prompt_tokens=9)], "big"))
    RouteTable([small, big, auto])
    with pytest.raises(ConfigError, match="lead to 'big', which is no route"):
        RouteTable([small, auto])
    with pytest.raises(ConfigError, match="rules of its own"):
        RouteTable([small, big, auto, Route("more", (), rules=RuleSet([Rule("auto", tools=True)], "big"))])
