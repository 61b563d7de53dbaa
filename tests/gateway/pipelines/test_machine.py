"""The machine of a run, in whatever order things happen: it ends once, leaves nothing behind, and keeps its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.config_file import ConfigFile
from penstock.core.errors import BudgetExhausted, EngineFailed, InvalidRequest, Overloaded, PenstockError, StepTimeout
from penstock.gateway.pipelines.checker import pipeline_from
from penstock.gateway.pipelines.graph import Pipeline, max_attempts
from penstock.gateway.pipelines.machine import (
    Action,
    Actions,
    Answer,
    CancelTimer,
    Fail,
    Failure,
    Machine,
    SetTimer,
    Start,
    Stop,
)
from tests.examples import examples
from tests.gateway.pipelines.written import written

TEXT = "Why?"
JOINED = "{{ all | tojson }}"
INPUT = {"text": TEXT, "messages": [{"role": "user", "content": TEXT}], "metadata": {}}
MODEL = {"model": "m", "prompt": "{{ input.text }}"}
FAILURES = st.sampled_from(
    [
        Failure(EngineFailed("it broke")),
        Failure(Overloaded("busy", retry_after_s=2.0)),
        Failure(InvalidRequest("no"), may_retry=False),
        Failure(BudgetExhausted("spent"), may_retry=False, may_fall_back=False),
    ]
)


def pipeline(steps: dict[str, Any], **more: Any) -> Pipeline:
    return pipeline_from(ConfigFile(Path("pipeline.yaml"), {"name": "p", "steps": steps} | more, {}))


# -- pipelines of all kinds: a step is a model, or has steps inside


def policies(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={"retries": st.integers(0, 2), "timeout_s": st.sampled_from((1.0, 10.0)), "fallback": inner}
    )


LEAVES = st.one_of(
    st.just(MODEL), st.just({"template": "<{{ input.text }}>"}), st.just({"template": "{{ input.metadata.none }}"})
)


def wholes(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Steps with steps inside. Each results in text, so that any may stand in for another."""
    several = st.lists(inner, min_size=1, max_size=3)
    blocks = several.map(lambda steps: {"steps": {f"s{number}": step for number, step in enumerate(steps)}})
    branches = inner.map(lambda step: {"branch": "input.text", "cases": {TEXT: step}, "default": MODEL})
    parallels = several.map(
        lambda steps: {
            "steps": {
                "all": {"parallel": {f"a{number}": step for number, step in enumerate(steps)}},
                "text": {"template": JOINED},
            }
        }
    )
    maps = inner.map(
        lambda step: {
            "steps": {
                "list": {"value": [3, 1, 2], "output": {"list": "json"}},
                "all": {"map": "list", "at_once": 2, "max_items": 3, "step": step},
                "text": {"template": JOINED},
            }
        }
    )
    kinds = st.one_of(blocks, branches, parallels, maps, inner)
    return st.builds(lambda step, policy: step | policy, kinds, policies(st.one_of(LEAVES, inner)))


def unique(step: dict[str, Any], names: Iterator[int]) -> dict[str, Any]:
    """The same with other names in its blocks: those of a block hide nothing outside."""
    found = dict(step)
    for key in ("fallback", "step", "default"):
        if key in step:
            found[key] = unique(step[key], names)
    for key in ("parallel", "cases"):
        if key in step:
            found[key] = {name: unique(inner, names) for name, inner in step[key].items()}
    if "steps" in step:
        number = next(names)
        found["steps"] = {f"{name}{number}": unique(inner, names) for name, inner in step["steps"].items()}
        for inner in found["steps"].values():
            if inner.get("template") == JOINED:
                inner["template"] = JOINED.replace("all", f"all{number}")
            elif inner.get("map") == "list":
                inner["map"] = f"list{number}"
    return found


STEPS = st.recursive(LEAVES, wholes, max_leaves=6)


class Shell:
    """Does what a machine says, when the test lets it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.machine = Machine(pipeline, INPUT)
        self.now = 0.0
        self.work: dict[int, Start] = {}
        self.timers: dict[int, float] = {}
        self.starts: Counter[int] = Counter()
        self.ends: list[Action] = []
        self.do(self.machine.begin(self.now))

    def do(self, actions: Actions) -> None:
        for action in actions:
            assert not self.ends, "nothing is done after the end"
            match action:
                case Start(attempt, _):
                    self.starts[attempt] += 1
                    self.work[attempt] = action
                case Stop(attempt):
                    del self.work[attempt]
                case SetTimer(timer, after_s):
                    assert timer not in self.timers
                    self.timers[timer] = self.now + after_s
                case CancelTimer(timer):
                    del self.timers[timer]
                case Answer() | Fail():
                    self.ends.append(action)

    def done(self, attempt: int, value: Any = "done") -> None:
        del self.work[attempt]
        self.do(self.machine.done(attempt, value, self.now))

    def failed(self, attempt: int, failure: Failure) -> None:
        del self.work[attempt]
        self.do(self.machine.failed(attempt, failure, self.now))

    def next_timer(self) -> None:
        timer = min(self.timers, key=lambda one: self.timers[one])
        self.now = max(self.now, self.timers.pop(timer))
        self.do(self.machine.timer_fired(timer, self.now))


@settings(max_examples=examples(100))
@given(steps=st.lists(STEPS, min_size=1, max_size=3), data=st.data())
def test_every_run_ends_once_and_leaves_nothing_behind(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    names = count()
    found = pipeline({f"step{number}": unique(step, names) for number, step in enumerate(steps)})
    shell = Shell(found)
    most = max_attempts(found.root)
    leaves_after = data.draw(st.one_of(st.just(10_000), st.integers(0, 10)), label="the client leaves after")
    for turn in range(4 * most + 10):
        if shell.ends or shell.machine.is_over:
            break
        if turn == leaves_after:
            shell.do(shell.machine.cancel(shell.now))
            assert not shell.ends, "nobody is there to be answered"
            break
        draw_event(shell, data)
    machine = shell.machine
    assert machine.is_over, "it ends within a number of events that its file tells"
    assert len(shell.ends) <= 1
    assert not shell.work
    assert not shell.timers
    assert set(shell.starts.values()) <= {1}, "nothing is started twice"
    records = machine.records
    assert len({record.attempt for record in records}) == len(records) <= most
    assert set(shell.starts) <= {record.attempt for record in records}
    assert all(record.number <= record.step.policy.retries + 1 for record in records)
    assert all(record.began <= record.ended for record in records)
    for event in (
        machine.cancel(99.0),
        machine.timer_fired(1, 99.0),
        machine.done(1, "late", 99.0),
        machine.begin(99.0),
    ):
        assert event == []


def draw_event(shell: Shell, data: st.DataObject) -> None:
    kinds = [kind for kind, has in (("done", shell.work), ("failed", shell.work), ("timer", shell.timers)) if has]
    assert kinds, "it waits for something"
    kind = data.draw(st.sampled_from([*kinds, *(("done",) * 3 if shell.work else ())]))
    if kind == "timer":
        shell.next_timer()
        return
    attempt = data.draw(st.sampled_from(sorted(shell.work)))
    if kind == "failed":
        shell.failed(attempt, data.draw(FAILURES))
        return
    shell.do(shell.machine.began(attempt, shell.now))
    shell.done(attempt, data.draw(st.sampled_from(("text", "text", 7))))
    assert shell.machine.done(attempt, "again", shell.now) == []


@given(items=st.lists(st.integers(), max_size=8), at_once=st.integers(1, 4), data=st.data())
def test_a_map_keeps_the_order_and_its_bound(items: list[int], at_once: int, data: st.DataObject) -> None:
    step = {"model": "m", "prompt": "{{ index }}: {{ item }}"}
    shell = Shell(
        pipeline(
            {
                "list": {"value": items, "output": {"list": "json"}},
                "all": {"map": "list", "at_once": at_once, "max_items": 8, "step": step},
            }
        )
    )
    while not shell.ends:
        assert len(shell.work) <= at_once
        attempt = data.draw(st.sampled_from(sorted(shell.work)))
        asked = shell.work[attempt].call.messages[0]["content"]
        shell.done(attempt, asked)
    assert shell.ends == [Answer([f"{index}: {item}" for index, item in enumerate(items)])]


@given(order=st.permutations(["a", "b", "c"]))
def test_parallel_results_are_in_the_order_of_the_file(order: list[str]) -> None:
    arms = {name: MODEL | {"prompt": name} for name in "abc"}
    shell = Shell(pipeline({"all": {"parallel": arms}}))
    by_prompt = {one.call.messages[0]["content"]: attempt for attempt, one in shell.work.items()}
    for name in order:
        shell.done(by_prompt[name], name.upper())
    (answer,) = shell.ends
    assert isinstance(answer, Answer)
    assert list(answer.value.items()) == [("a", "A"), ("b", "B"), ("c", "C")]


# -- one at a time


def test_a_step_is_tried_again_after_a_pause_that_grows() -> None:
    shell = Shell(pipeline({"answer": MODEL | {"retries": 2}}))
    pauses = []
    for _ in range(2):
        (attempt,) = shell.work
        shell.failed(attempt, Failure(EngineFailed("it broke")))
        began = shell.now
        shell.next_timer()
        pauses.append(round(shell.now - began, 3))
    assert pauses == [0.1, 0.2]
    (attempt,) = shell.work
    shell.failed(attempt, Failure(EngineFailed("it broke")))
    (end,) = shell.ends
    assert isinstance(end, Fail)
    assert end.error.message == "step 'answer': it broke"
    assert [record.number for record in shell.machine.records if record.step.name == "answer"] == [1, 2, 3]


def test_a_server_that_says_when_to_come_back_is_believed_within_bounds() -> None:
    shell = Shell(pipeline({"answer": MODEL | {"retries": 1}}, timeout_s=1000))
    (attempt,) = shell.work
    shell.failed(attempt, Failure(Overloaded("busy", retry_after_s=60.0)))
    shell.next_timer()
    assert shell.now == 5.0


def test_a_step_that_takes_too_long_is_stopped_and_falls_back() -> None:
    shell = Shell(pipeline({"answer": MODEL | {"timeout_s": 3, "fallback": {"template": "later"}}}))
    shell.next_timer()
    assert shell.now == 3.0
    assert shell.ends == [Answer("later")]
    outcomes = [(record.step.name, record.outcome, record.is_fallback) for record in shell.machine.records]
    assert outcomes == [("answer", "timeout", False), ("answer.fallback", "ok", True), ("", "ok", False)]


def test_the_whole_has_a_time_of_its_own() -> None:
    shell = Shell(pipeline({"answer": MODEL | {"fallback": {"template": "later"}}}, timeout_s=2))
    shell.next_timer()
    (end,) = shell.ends
    assert isinstance(end, Fail)
    assert isinstance(end.error, StepTimeout)
    assert end.error.message == "the pipeline: it took longer than 2 s"


def test_what_the_tenant_may_not_have_falls_back_to_nothing() -> None:
    shell = Shell(pipeline({"answer": MODEL | {"retries": 3, "fallback": {"template": "later"}}}))
    (attempt,) = shell.work
    shell.failed(attempt, Failure(BudgetExhausted("spent"), may_retry=False, may_fall_back=False))
    assert failure_of(shell).code == "budget_exhausted"


def test_nothing_is_tried_again_once_the_client_has_a_part() -> None:
    shell = Shell(pipeline({"answer": MODEL | {"retries": 3, "fallback": {"template": "later"}}}))
    (attempt,) = shell.work
    shell.do(shell.machine.began(attempt, 0.0))
    shell.failed(attempt, Failure(EngineFailed("it broke")))
    assert failure_of(shell).message == "step 'answer': it broke"


def test_only_the_last_step_answers_the_client() -> None:
    shell = Shell(pipeline({"first": MODEL, "last": MODEL}))
    seen = []
    while shell.work:
        ((attempt, start),) = shell.work.items()
        seen.append((start.call.step.name, start.call.is_answer))
        shell.done(attempt)
    assert seen == [("first", False), ("last", True)]


def test_a_result_that_is_used_again_is_no_answer_yet() -> None:
    shell = Shell(pipeline({"answer": MODEL, "more": {"template": "{{ answer }}!"}}))
    ((attempt, start),) = shell.work.items()
    assert not start.call.is_answer
    shell.done(attempt, "so")
    assert shell.ends == [Answer("so!")]


def test_when_one_of_several_fails_the_others_are_stopped() -> None:
    shell = Shell(pipeline({"all": {"parallel": {"a": MODEL, "b": MODEL}}}))
    first, second = sorted(shell.work)
    shell.failed(first, Failure(EngineFailed("it broke")))
    assert failure_of(shell).message == "step 'all.a': it broke"
    outcomes = {record.attempt: record.outcome for record in shell.machine.records}
    assert outcomes[second] == "cancelled"


def test_a_wrong_result_is_a_failure_of_its_step(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        """
        name: p
        steps:
          it: {python: steps.py:it, inputs: {text: input.text}, output: {labels: [a, b]}, retries: 1}
        """,
        steps="def it(text): ...",
    )
    shell = Shell(found)
    (attempt,) = shell.work
    shell.done(attempt, "c")
    shell.next_timer()
    (attempt,) = shell.work
    shell.done(attempt, {"label": "b", "scores": {"a": 0.25, "b": 0.75}})
    (end,) = shell.ends
    assert isinstance(end, Answer)
    assert (str(end.value), end.value.score) == ("b", 0.75)
    assert next((record.outcome, record.reason) for record in shell.machine.records) == ("failed", "wrong_result")


@pytest.mark.parametrize(
    ("items", "reason"), [(list(range(4)), "too_many_items"), ("text", "wrong_result")], ids=["too many", "no list"]
)
def test_a_list_that_is_too_long_is_an_error(tmp_path: Path, items: object, reason: str) -> None:
    found = written(
        tmp_path,
        """
        name: p
        steps:
          list: {python: steps.py:it, output: {list: json}}
          all: {map: list, max_items: 3, step: {template: "{{ item }}"}}
        """,
        steps="def it(): ...",
    )
    shell = Shell(found)
    (attempt,) = shell.work
    shell.done(attempt, items)
    assert failure_of(shell).reason == reason


def test_a_long_map_of_templates_is_no_deep_stack() -> None:
    shell = Shell(
        pipeline(
            {
                "list": {"value": list(range(3000)), "output": {"list": "json"}},
                "all": {"map": "list", "max_items": 3000, "step": {"template": "{{ item }}"}},
            }
        )
    )
    (end,) = shell.ends
    assert isinstance(end, Answer)
    assert end.value == [str(number) for number in range(3000)]


def failure_of(shell: Shell) -> PenstockError:
    (end,) = shell.ends
    assert isinstance(end, Fail)
    return end.error
