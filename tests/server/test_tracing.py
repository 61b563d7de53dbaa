"""A replica's spans of a request, made of the times that were taken."""

from __future__ import annotations

from itertools import count

import pytest

from penstock.core.ranks import RankFigures
from penstock.core.request import KvSource, RequestTimings
from penstock.observe.backlog import Backlog
from penstock.observe.registry import Counter
from penstock.observe.spans import Kind, Roots, Sampling, Span
from penstock.server.recorder import Finished
from penstock.server.tracing import Traced, Traces, rank_attributes, spans

TRACE, GATEWAY = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = {"tokenize": 0.1, "queue": 0.2, "prefill": 0.3, "first_token": 0.05}


def finished(flags: str = "01", **more: object) -> Finished:
    context = {b"traceparent": f"00-{TRACE}-{GATEWAY}-{flags}".encode()}
    known = Finished(
        "id", "small", "chat", 200, "ok", 2.0, True, 30, 10, 8, 0.65, PARTS, decode_s=1.25, context=context
    )
    return known._replace(**more)


class Kept(Backlog[Traced]):
    def __init__(self, most: int = 100) -> None:
        super().__init__("kept", most=most, batch=100)

    def write(self, batch: list[Traced]) -> None:
        raise AssertionError

    def spans(self) -> list[Span]:
        ids = count(1)
        return [span for one in self._waiting for span in spans(one, lambda: f"{next(ids):016x}")]


def kept(*all_finished: Finished, most: int = 100) -> Kept:
    out, lost = Kept(most), Counter()
    traces = Traces(Roots(Sampling(0.0)), out, lost)
    for one in all_finished:
        traces.ended(one)
    return out


def test_the_parts_of_a_request_follow_each_other_below_the_gateways_span() -> None:
    root, *parts = kept(finished()).spans()
    assert (root.trace_id, root.parent_id, root.kind, root.name) == (TRACE, GATEWAY, Kind.SERVER, "chat small")
    assert root.end_ns - root.start_ns == 2_000_000_000
    assert [part.name for part in parts] == ["tokenize", "engine queue", "prefill", "first token", "decode"]
    assert {part.parent_id for part in parts} == {root.span_id}
    assert parts[0].start_ns == root.start_ns
    assert [part.start_ns for part in parts[1:]] == [part.end_ns for part in parts[:-1]]
    assert [round((part.end_ns - part.start_ns) / 1e9, 3) for part in parts] == [0.1, 0.2, 0.3, 0.05, 1.25]
    assert parts[2].attributes == {"penstock.tokens": 20}
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 10


def test_a_pull_of_kv_blocks_is_a_span_that_says_from_where_and_what_came_of_it() -> None:
    parts = {"tokenize": 0.1, "pull": 0.15, "queue": 0.05, "prefill": 0.3, "first_token": 0.05}
    one = finished(parts=parts, kv_source=KvSource("10.0.0.7:9021", True), engine=RequestTimings(0.05, 0.3, 0.15, 16))
    _, _, pull, queue, *_ = kept(one).spans()
    assert (pull.name, queue.name) == ("KV pull", "engine queue")
    assert pull.end_ns - pull.start_ns == 150_000_000
    assert pull.attributes == {
        "penstock.tokens": 16,
        "penstock.outcome": "incomplete",
        "penstock.kv.source": "10.0.0.7:9021",
        "penstock.kv.prefills": True,
    }
    _, _, whole, *_ = kept(one._replace(engine=RequestTimings(0.05, 0.3, 0.15, 16, True))).spans()
    assert whole.attributes["penstock.outcome"] == "ok"


@pytest.mark.parametrize(
    ("one", "is_kept"),
    [
        (finished("00"), False),
        (finished("00", ttft_s=3.0), True),
        (finished("00", total_s=61.0), True),
        (finished("00", status=500, outcome="engine_failed", ttft_s=None, parts={}), True),
        (finished("00", status=429, outcome="overloaded", ttft_s=None, parts={}), False),
        (finished("00", status=503, outcome="request_aborted", parts={}), False),  # the client left
        (finished(route="messages/count_tokens"), False),
    ],
)
def test_what_is_not_sampled_is_kept_only_if_it_failed_or_was_slow(one: Finished, is_kept: bool) -> None:
    assert bool(kept(one).spans()) == is_kept


def test_what_failed_says_so_and_has_the_parts_it_got_to() -> None:
    (root,) = kept(finished("00", status=500, outcome="engine_failed", ttft_s=None, parts={})).spans()
    assert (root.error, root.attributes["error.type"]) == ("engine_failed", "engine_failed")


def test_what_cannot_be_kept_is_counted() -> None:
    out, lost = Kept(most=1), Counter()
    traces = Traces(Roots(Sampling()), out, lost)
    for _ in range(3):
        traces.ended(finished())
    traces.ended(finished(route="models"))
    assert lost.value == 2


def test_a_request_of_a_model_over_several_ranks_says_how_they_stood() -> None:
    ranks = [RankFigures(0, memory_bytes=100, communication=0.25), RankFigures(1, memory_bytes=200, communication=0.5)]
    out = Kept()
    Traces(Roots(Sampling()), out, Counter(), lambda: rank_attributes("TP2", ranks)).ended(finished())
    root, *parts = out.spans()
    assert {name: value for name, value in root.attributes.items() if "rank" in name or "parallelism" in name} == {
        "penstock.parallelism": "TP2",
        "penstock.rank.memory_bytes": [100.0, 200.0],
        "penstock.rank.communication": [0.25, 0.5],
        "penstock.rank.communication_method": "measured",
    }
    assert not any("penstock.parallelism" in part.attributes for part in parts)


def test_a_figure_that_one_rank_lacks_is_left_out_and_one_rank_has_none() -> None:
    estimated = [RankFigures(0, mbu=0.5, communication=0.1, is_estimated=True), RankFigures(1, communication=0.1)]
    found = rank_attributes("TP2", estimated)
    assert "penstock.rank.mbu" not in found
    assert found["penstock.rank.communication_method"] == "estimated"
    assert rank_attributes("TP2", []) == {"penstock.parallelism": "TP2"}
    assert rank_attributes("", []) == {}
