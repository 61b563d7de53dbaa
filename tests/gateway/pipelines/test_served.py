"""Pipelines behind one name, as their clients see them: real HTTP, and a provider that does as it is told."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.request_log import RequestLog
from penstock.gateway.records.tracing import Traces
from penstock.gateway.settings.gateway import ModelSettings
from penstock.observe.spans import Kind, Roots, Sampling, Span
from penstock.tenancy.prices import Price
from tests.clocks import ManualClock
from tests.gateway.pipelines.written import written
from tests.gateway.provider import Provider, providing
from tests.gateway.records.test_tracing import Kept, context
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "Why?"}]
TWO_STEPS = """
    name: asked
    description: Shortly.
    steps:
      question: {template: "Answer shortly: {{ input.text }}"}
      answer: {model: small, prompt: "{{ question }}"}
"""
FOUR_CALLS = """
    name: asked
    steps:
      both:
        parallel:
          one: {model: small, prompt: "1"}
          two: {model: large, prompt: "2"}
      list: {value: ["a", "b"], output: {list: text}}
      each: {map: list, step: {model: small, prompt: "{{ item }}"}}
      answer: {template: "{{ both.one }}, {{ both.two }}, {{ each | tojson }}"}
"""


@contextlib.contextmanager
def serving(
    directory: Path, text: str, *providers: Provider, files: dict[str, str] | None = None, **options: Any
) -> Iterator[RunningGateway]:
    """The models `small` and `large`, at these providers; there may be one."""
    price = Price(input=1.0, output=2.0)
    pools = {
        name: ModelSettings(replicas=[provider.url], dialect="openai", price=price)
        for name, provider in zip(("small", "large"), providers * 2, strict=False)
    }
    with running_gateway(pools=pools, pipelines=[written(directory, text, **files or {})], **options) as gateway:
        yield gateway
        eventually(gateway.is_idle)
        eventually(lambda: num_open(gateway) == 0)


def num_open(gateway: RunningGateway) -> int:
    assert gateway.app.pipelines is not None
    return gateway.app.pipelines.num_open


def ask(gateway: RunningGateway, key: str = "none", **more: Any) -> Any:
    return gateway.client(key).chat.completions.create(model="asked", messages=MESSAGES, **more)


def steps_counted(gateway: RunningGateway) -> dict[tuple[str, str], int]:
    """By step and outcome."""
    found = re.findall(r'pipeline_steps_total{pipeline="asked",step="(.*?)",outcome="(.*?)"} (\d+)', gateway.metrics())
    return {(step, outcome): int(count) for step, outcome, count in found}


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_and_a_model_answer_as_one(tmp_path: Path, stream: bool) -> None:
    with providing(says="Because.") as provider, serving(tmp_path, TWO_STEPS, provider) as gateway:
        found: Any = ask(gateway, stream=stream)
        if stream:
            chunks = list(found)
            assert {chunk.model for chunk in chunks} == {"asked"}
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Because."
        else:
            assert (found.model, found.choices[0].message.content) == ("asked", "Because.")
            assert found.usage.total_tokens == 4
        (asked,) = provider.asked
        assert asked["messages"] == [{"role": "user", "content": "Answer shortly: Why?"}]
        models = {model.id: model.to_dict().get("description") for model in gateway.openai.models.list()}
        assert models == {"small": None, "large": None, "asked": "Shortly."}
        eventually(lambda: [usage.requests for usage in gateway.ledger.usages] == [0, 1])
        assert [usage.model for usage in gateway.ledger.usages] == ["small", "asked"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last", ['{model: small, prompt: "{{ question }}"}', '{template: "so {{ question }}"}'])
def test_the_answer_tells_what_each_step_used_if_asked(tmp_path: Path, stream: bool, last: str) -> None:
    text = f"""
        name: asked
        steps:
          question: {{model: small, prompt: "{{{{ input.text }}}}"}}
          answer: {last}
    """
    with providing() as provider, serving(tmp_path, text, provider) as gateway:
        found: Any = ask(gateway, stream=stream, extra_body={"include_steps": True})
        if stream:
            *_, found = found
            assert not found.choices
        steps = found.model_dump()["steps"]
        assert [(one["step"], one["outcome"]) for one in steps] == [("question", "ok"), ("answer", "ok")]
        assert all(one["seconds"] >= 0 for one in steps)
        used = [one["usage"]["total_tokens"] for one in steps if one["kind"] == "model"]
        assert sum(used) == found.usage.total_tokens == 4 * len(used)
        assert all("include_steps" not in body for body in provider.asked)
        with pytest.raises(openai.BadRequestError):
            ask(gateway, extra_body={"include_steps": "all"})


def test_fields_of_the_request_go_to_the_steps_that_they_are_for(tmp_path: Path) -> None:
    text = """
        name: asked
        steps:
          first: {model: small, prompt: "{{ input.text }}", parameters: {temperature: 0}}
          seeded: {model: small, prompt: "{{ first }}", forward: [seed]}
          answer: {model: small, prompt: "{{ seeded }}", parameters: {top_p: 0.5}}
    """
    with providing() as provider, serving(tmp_path, text, provider) as gateway:
        ask(gateway, user="ada", service_tier="flex", temperature=0.7, top_p=0.9, seed=3, metadata={"a": "b"})
        first, seeded, answer = provider.asked
    assert {one["user"] for one in provider.asked} == {"ada"}
    assert {one["service_tier"] for one in provider.asked} == {"flex"}
    own = ("temperature", "top_p", "seed", "metadata")
    assert [{key: one[key] for key in own if key in one} for one in (first, seeded, answer)] == [
        {"temperature": 0},
        {"seed": 3},
        {"temperature": 0.7, "top_p": 0.5, "seed": 3},
    ]


def test_a_pipeline_can_be_served_when_the_models_of_its_steps_can(tmp_path: Path) -> None:
    with (
        providing() as small,
        providing() as large,
        serving(tmp_path, FOUR_CALLS, small, large, clock=ManualClock()) as gateway,
    ):
        assert gateway.call(lambda: gateway.app.can_serve("asked"))
        (gone,) = [one for one in gateway.app.replicas.values() if one.model == "large"]

        def leave() -> None:
            gone.health.is_in = False
            gateway.app.replicas.changed(gone)

        gateway.call(leave)
        assert not gateway.call(lambda: gateway.app.can_serve("asked"))
        assert gateway.call(lambda: gateway.app.can_serve("small"))


def test_lines_of_the_request_log_tell_steps_from_the_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.gateway.request")
    with (
        RequestLog() as log,
        providing() as provider,
        serving(tmp_path, TWO_STEPS, provider, recorder=GatewayRecorder(log)) as gateway,
    ):
        ask(gateway)
        eventually(gateway.is_idle)
        eventually(lambda: num_open(gateway) == 0)
    step, whole = "\n".join(caplog.messages).splitlines()
    assert re.search(r"model=asked .* steps=2 ", whole)
    id_ = re.search(r" id=(\w+) ", whole)
    assert id_ is not None
    assert f" step_of={id_[1]} " in step


# -- limits


def test_the_whole_counts_once_against_limits_whatever_its_steps_ask(tmp_path: Path) -> None:
    with (
        providing(says="x") as small,
        providing(says="y") as large,
        serving(tmp_path, FOUR_CALLS, small, large, clock=ManualClock()) as gateway,
    ):
        key = gateway.add_tenant("acme", limits={"requests_per_minute": 2, "concurrency": 1})
        for _ in range(2):
            assert ask(gateway, key).choices[0].message.content == 'x, y, ["x","x"]'
        with pytest.raises(openai.RateLimitError) as refused:
            ask(gateway, key)
        assert refused.value.body["reason"] == "requests_per_minute"  # type: ignore[index]
        assert (len(small.asked), len(large.asked)) == (6, 2)
        eventually(lambda: len(gateway.ledger.usages) == 10)
        usages = gateway.ledger.usages
    assert sum(usage.requests for usage in usages) == 2
    assert {usage.tenant_id for usage in usages} == {"acme"}
    assert sum(usage.output_tokens for usage in usages) == 8
    assert sum(usage.cost_nanos for usage in usages) == 8 * (3 * 1000 + 2 * 1000)


def test_tokens_of_all_steps_are_of_the_tenants_minute(tmp_path: Path) -> None:
    with providing() as provider, serving(tmp_path, FOUR_CALLS, provider, clock=ManualClock()) as gateway:
        key = gateway.add_tenant("acme", limits={"tokens_per_minute": 20})
        ask(gateway, key)  # four times four tokens
        with pytest.raises(openai.RateLimitError) as refused:
            ask(gateway, key)
        assert refused.value.body["reason"] == "tokens_per_minute"  # type: ignore[index]


def test_a_tenant_needs_the_pipeline_and_not_the_models_of_its_steps(tmp_path: Path) -> None:
    with providing(says="Because.") as provider, serving(tmp_path, TWO_STEPS, provider) as gateway:
        key = gateway.add_tenant("acme", models=["asked"])
        assert ask(gateway, key).choices[0].message.content == "Because."
        with pytest.raises(openai.NotFoundError):
            gateway.client(key).chat.completions.create(model="small", messages=MESSAGES)


# -- policies


def test_a_step_is_tried_again_falls_back_and_is_counted(tmp_path: Path) -> None:
    text = """
        name: asked
        steps:
          answer:
            model: small
            prompt: "{{ input.text }}"
            retries: 1
            fallback: {model: large, prompt: "{{ input.text }}"}
    """
    with (
        providing(status=500) as broken,
        providing(says="Well.") as well,
        serving(tmp_path, text, broken, well, clock=ManualClock()) as gateway,
    ):
        found: list[Any] = []
        with in_background(lambda: found.append(ask(gateway))):
            gateway.until(lambda: found)
        assert found[0].choices[0].message.content == "Well."
        assert eventually(lambda: steps_counted(gateway)) == {("answer", "failed"): 2, ("answer.fallback", "ok"): 1}
        told = gateway.metrics()
    assert 'pipeline_step_retries_total{pipeline="asked",step="answer"} 1' in told
    assert 'pipeline_step_tokens_total{pipeline="asked",step="answer.fallback",kind="input"} 3' in told
    assert 'pipeline_step_cost_total{pipeline="asked",step="answer.fallback"} 5e-06' in told


def test_a_step_that_takes_too_long_is_given_up_and_its_server_told(tmp_path: Path) -> None:
    text = TWO_STEPS.replace('"{{ question }}"}', '"{{ question }}", timeout_s: 2}')
    with providing(dawdles=True) as provider, serving(tmp_path, text, provider, clock=ManualClock()) as gateway:
        found: list[openai.APIStatusError] = []

        def fail() -> None:
            with pytest.raises(openai.APIStatusError) as failed:
                ask(gateway)
            found.append(failed.value)

        with in_background(fail):
            eventually(lambda: provider.asked)
            gateway.advance(3.0)
            eventually(lambda: found)
        assert (found[0].status_code, found[0].code) == (504, "step_timeout")
        assert "step 'answer'" in found[0].message
        eventually(gateway.is_idle)
        provider.may_answer.set()
        eventually(lambda: provider.num_left == 1)
        assert steps_counted(gateway) == {("question", "ok"): 1, ("answer", "timeout"): 1}


def test_a_step_that_is_given_up_is_charged_by_what_was_made(tmp_path: Path) -> None:
    """And not by all that it might have become: its tenant did not leave."""
    text = """
        name: asked
        steps:
          both: {parallel: {slow: {model: small, prompt: x}, wrong: {model: large, prompt: x}}}
          answer: {template: "{{ both.slow }}"}
    """
    with (
        providing(dawdles=True) as slow,
        providing(dawdles=True, status=400) as wrong,
        serving(tmp_path, text, slow, wrong) as gateway,
    ):

        def go_wrong() -> None:
            eventually(lambda: slow.asked)
            wrong.may_answer.set()

        with in_background(go_wrong), pytest.raises(openai.APIStatusError):
            ask(gateway)
        eventually(lambda: num_open(gateway) == 0)
        eventually(lambda: [usage.model for usage in gateway.ledger.usages][-1:] == ["asked"])
        assert sum(usage.output_tokens for usage in gateway.ledger.usages) == 0
        slow.may_answer.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_steps_under_way(tmp_path: Path, stream: bool) -> None:
    with providing(dawdles=True) as provider, serving(tmp_path, FOUR_CALLS, provider) as gateway:
        leaver = http.client.HTTPConnection("127.0.0.1", gateway.port)
        with contextlib.closing(leaver):
            body = {"model": "asked", "messages": MESSAGES, "stream": stream}
            leaver.request("POST", "/v1/chat/completions", json.dumps(body))
            eventually(lambda: len(provider.asked) == 2)
        eventually(gateway.is_idle)
        eventually(lambda: num_open(gateway) == 0)
        counted = eventually(lambda: steps_counted(gateway))
        assert {outcome for _, outcome in counted} == {"cancelled"}
        assert ("each", "cancelled") not in counted  # it never began
        assert 'outcome="client_gone"' in gateway.metrics()
        provider.may_answer.set()


# -- answers of no use


@pytest.mark.parametrize(
    ("says", "step", "reason"),
    [
        ("no JSON", "{model: small, prompt: x, schema: {type: object, required: [a]}}", "wrong_result"),
        ('{"b": 1}', "{model: small, prompt: x, schema: {type: object, required: [a]}}", "wrong_result"),
        ("maybe", "{model: small, prompt: x, choice: ['yes', 'no']}", "wrong_result"),
        ("x" * (9 << 20), "{model: small, prompt: x}", "too_large"),
        ("x", "{model: small, task: embeddings, text: input.text}", "wrong_result"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_the_wrong_type_is_an_error_that_names_the_step(
    tmp_path: Path, says: str, step: str, reason: str, stream: bool
) -> None:
    """Never as the last step, whose answer has gone to the client by then."""
    text = f"name: asked\nsteps:\n  one: {step}\n  two: {{template: '{{{{ one | tojson }}}}'}}"
    with providing(says=says) as provider, serving(tmp_path, text, provider) as gateway:
        with pytest.raises(openai.APIStatusError) as failed:
            ask(gateway, stream=stream)
        assert (failed.value.status_code, failed.value.code) == (502, "step_failed")
        assert failed.value.body["reason"] == reason  # type: ignore[index]
        assert failed.value.message.find("step 'one'") >= 0


def test_a_map_over_more_than_its_bound_asks_nobody(tmp_path: Path) -> None:
    text = """
        name: asked
        steps:
          parts: {map: input.messages, max_items: 3, step: {model: small, prompt: "{{ item.content }}"}}
          answer: {template: "{{ parts | tojson }}"}
    """
    with providing() as provider, serving(tmp_path, text, provider) as gateway:
        with pytest.raises(openai.APIStatusError) as failed:
            gateway.openai.chat.completions.create(model="asked", messages=MESSAGES * 4)
        assert (failed.value.status_code, failed.value.body["reason"]) == (502, "too_many_items")  # type: ignore[index]
        assert not provider.asked


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"messages": []}, 400, "invalid_request"),
        ({"messages": "Why?"}, 400, "invalid_request"),
        ({"messages": [{"content": "Why?"}]}, 400, "invalid_request"),
        ({"messages": MESSAGES, "n": 3}, 400, "unsupported_parameter"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "unsupported_parameter"),
        ({"messages": MESSAGES, "steps": {"x": {"python": "os.py:system"}}}, 200, ""),  # never by API
    ],
)
def test_a_request_that_no_pipeline_takes_is_refused(
    tmp_path: Path, body: dict[str, Any], status: int, code: str
) -> None:
    with providing() as provider, serving(tmp_path, TWO_STEPS, provider) as gateway:
        answer = gateway.openai._client.post(f"{gateway.url}/v1/chat/completions", json={"model": "asked", **body})
        assert answer.status_code == status
        assert answer.json().get("error", {}).get("code", "") == code


@pytest.mark.parametrize("path", ["messages", "responses", "embeddings"])
def test_other_kinds_of_requests_are_refused_by_name(tmp_path: Path, path: str) -> None:
    with providing() as provider, serving(tmp_path, TWO_STEPS, provider) as gateway:
        body = {"model": "asked", "messages": MESSAGES, "input": "x", "max_tokens": 5}
        answer = gateway.openai._client.post(f"{gateway.url}/v1/{path}", json=body)
        assert answer.status_code == 400
        assert "'asked' is a pipeline" in answer.text


# -- spans


def test_each_attempt_at_a_step_has_a_span_with_its_request_below(tmp_path: Path) -> None:
    kept = Kept()
    recorder = GatewayRecorder(traces=Traces(Roots(Sampling(continues=False)), kept))
    text = FOUR_CALLS.replace('{model: large, prompt: "2"}', '{template: "2"}')
    with providing() as provider, serving(tmp_path, text, provider, recorder=recorder) as gateway:
        ask(gateway)
        eventually(lambda: len(kept.all) == 4)
        sent = [context(provider, number) for number in range(3)]
        found = kept.spans()
    roots = {span.span_id: span for span in found if span.kind is Kind.SERVER}
    (whole,) = [span for span in roots.values() if not span.parent_id]
    assert whole.attributes["gen_ai.usage.input_tokens"] == 9
    assert whole.attributes["penstock.cost"] == pytest.approx(1.5e-5)
    steps = {span.span_id: span for span in found if span.name.startswith("step ")}
    assert sorted(_path(span, steps) for span in steps.values()) == [
        "answer",
        "both",
        "both/both.one",
        "both/both.two",
        "each",
        "each/each.step",
        "each/each.step",
        "list",
    ]
    assert {span.trace_id for span in found} == {whole.trace_id}
    of_models = [span for span in roots.values() if span is not whole]
    assert sorted(steps[span.parent_id].name for span in of_models) == [
        "step both.one",
        "step each.step",
        "step each.step",
    ]
    assert {one.trace_id for one in sent if one is not None} == {whole.trace_id}
    assert [
        span.attributes["penstock.cost"] for span in steps.values() if span.attributes["penstock.step.kind"] == "model"
    ] == [pytest.approx(5e-6)] * 3
    assert all(whole.start_ns <= span.start_ns <= span.end_ns <= whole.end_ns for span in steps.values())


def _path(span: Span, steps: dict[str, Span]) -> str:
    name = span.name.removeprefix("step ")
    parent = steps.get(span.parent_id)
    return f"{_path(parent, steps)}/{name}" if parent is not None else name


@contextlib.contextmanager
def in_background(work: Any) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        assert not thread.is_alive()
