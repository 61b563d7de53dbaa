import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.records.decision_log import DecisionLog, path_of_its_own
from penstock.gateway.records.decisions import (
    LENGTH,
    MAGIC,
    NUM_FILES,
    Decided,
    Ended,
    file_names,
    read_decisions,
    read_entries,
)
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.settings.gateway import ModelSettings
from penstock.router.legs import Alone, Source, SourceReason
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice, Router
from tests.gateway.provider import providing
from tests.gateway.running import running_gateway
from tests.snapshots import snapshot

CHAIN = (2**64 - 1, 2, 3)


def replica(name: str, **facts: Any) -> ReplicaSnapshot:
    return snapshot(id=name, models=("m",), kv_capacity_tokens=100_000, taken_at=4.5, **facts)


def over(id: str, replica: str = "", prompt: int = 0, cached: int = 0, output: int = 0, **times: Any) -> RequestFacts:
    return RequestFacts(
        id,
        "chat/completions",
        Ending.OK,
        model="m",
        replica=replica,
        input_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        queue_s=0.0,
        **times,
    )


def choose(number: int, replicas: int = 3) -> tuple[EdgeRequest, Choice]:
    router = Router()
    router.index.reset("r1", CHAIN[:2])
    request = EdgeRequest(f"q{number}", "m", 900, 50, "acme", hashes=CHAIN, expected_output=40, session="secret")
    candidates = [
        replica(f"r{i}", num_running=i, queued_tokens=10 * i, sent_kv_tokens=30, sent_sequences=-(i // 2), steps=i)
        for i in range(replicas)
    ]
    return request, router.pick(request, [*candidates, replica("out", is_tripped=True)], now=5.0)


def test_a_choice_is_read_back_with_what_it_was_made_from_and_what_came_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log" / "decisions.log"
    request, choice = choose(1)
    with DecisionLog(path) as log:
        log.decided(request, choice, now=5.0)
        log.decided(*choose(2), now=5.0)
        log.decided(request, choice, now=6.0)  # sent elsewhere
        log.ended(over("q1", "r1", 900, 512, 44, ttft_s=0.2, total_s=1.5))
        log.ended(RequestFacts("q3", "chat/completions", Ending.REFUSED))  # never sent to anybody
    first, second = read_decisions(path)
    assert (first.id, second.id, second.outcome) == ("q1", "q2", None)
    assert first.outcome == Ended("q1", "ok", "r1", 900, 512, 44, 0.0, 0.2, 1.5)
    decided, again = first.decisions
    assert (decided.picked, decided.strategy, decided.tenant) == ("r1", "kv_aware", "acme")
    assert (decided.dropped, decided.num_candidates) == ({"out": "breaker_open"}, 3)
    assert again.candidates[0].age_s == pytest.approx(1.5)
    seen = {each.id: each for each in decided.candidates}
    assert (seen["r1"].matched, seen["r0"].matched) == (2, 0)
    assert [each.total for each in decided.candidates] == choice.totals
    assert dict(zip(decided.scorers, zip(*(each.scores for each in decided.candidates), strict=True), strict=True)) == {
        name: tuple(scores) for name, scores in choice.scores.items()
    }
    assert b"secret" not in path.read_bytes()


def test_what_is_read_back_can_be_shown_to_another_policy(tmp_path: Path) -> None:
    request, choice = choose(1)
    with DecisionLog(tmp_path / "d") as log:
        log.decided(request, choice, now=5.0)
    (decided,) = next(read_decisions(tmp_path / "d")).decisions
    shown = decided.request()
    assert (shown.hashes, shown.prompt_tokens, shown.expected_output) == (CHAIN, 900, 40)
    replicas = [each.snapshot("m", now=5.0) for each in decided.candidates]
    for was, now in zip(choice.candidates, replicas, strict=True):
        assert (now.sequences, now.prefill_queued, now.step_s) == (was.sequences, was.prefill_queued, was.step_s)
        assert now.load.steps == was.load.steps
        assert now.queue_s == pytest.approx(was.queue_s)
        assert now.kv_pressure == pytest.approx(was.kv_pressure, abs=1e-4)
    again = Router().pick(shown, replicas, 5.0)
    assert again.scores["least_loaded"] == pytest.approx(choice.scores["least_loaded"], rel=1e-3)


def test_of_very_many_candidates_the_picked_and_the_best_are_kept(tmp_path: Path) -> None:
    request, choice = choose(1, replicas=100)
    choice.replica = choice.candidates[-1]  # as a picker that draws might
    with DecisionLog(tmp_path / "d") as log:
        log.decided(request, choice, now=5.0)
    (entry,) = read_entries(tmp_path / "d")
    assert isinstance(entry, Decided)
    assert entry.num_candidates == 100
    assert len(entry.candidates) == 16
    assert entry.candidates[0].id == entry.picked == "r99"
    assert entry.candidates[1].total == max(choice.totals)


def test_the_log_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "d"
    request, choice = choose(1)
    for i in range(40):
        with DecisionLog(path, max_bytes=8000) as log:  # what was there is gone on from
            log.decided(request, choice, now=5.0)
            log.ended(over(f"e{i}"))
    assert all(name.exists() for name in file_names(path))
    assert sum(name.stat().st_size for name in file_names(path)) <= 8000
    assert len(list(tmp_path.iterdir())) == NUM_FILES
    ids = [entry.id for entry in read_entries(path) if isinstance(entry, Ended)]
    assert ids == [f"e{i}" for i in range(40 - len(ids), 40)]
    assert len(ids) > 10


def test_what_a_crash_cut_off_is_left_out_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    for i in range(2):
        with DecisionLog(path) as log:
            log.ended(over(f"e{i}"))
    path.write_bytes(path.read_bytes()[:-3])
    assert [entry.id for entry in read_entries(path)] == ["e0"]
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError):
        list(read_entries(path))


def test_what_cannot_be_written_is_counted_and_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with DecisionLog(tmp_path / "file" / "d") as log:
        for i in range(3):
            log.ended(over(f"e{i}"))
    assert log.num_lost == 3


def test_how_a_request_came_to_its_pool_is_read_back_and_what_was_written_before_that_was_kept_too(
    tmp_path: Path,
) -> None:
    request, choice = choose(1)
    with DecisionLog(tmp_path / "d") as log:
        log.decided(request, choice, now=5.0, route="auto", version="v2", rule="short->m")
    (entry,) = read_entries(tmp_path / "d")
    assert isinstance(entry, Decided)
    assert (entry.route, entry.version, entry.rule) == ("auto", "v2", "short->m")
    added_since = len(Decided.__struct_fields__) - Decided.__struct_fields__.index("route")
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(entry))[:-added_since]
    block = zlib.compress(msgspec.msgpack.encode([older]))
    (tmp_path / "d").write_bytes(MAGIC + LENGTH.pack(len(block)) + block)
    (read,) = read_entries(tmp_path / "d")
    assert read == msgspec.structs.replace(entry, route="", version="", rule="")


def test_a_log_has_one_writer_and_is_gone_on_with_by_the_next(tmp_path: Path) -> None:
    with path_of_its_own(tmp_path / "new", "gateway") as first, path_of_its_own(tmp_path / "new", "gateway") as second:
        assert [first.name, second.name] == ["gateway.log", "gateway-2.log"]
        with path_of_its_own(tmp_path / "new", "gateway-8000") as other:
            assert other.name == "gateway-8000.log"
    with path_of_its_own(tmp_path / "new", "gateway") as again:
        assert again == first


def test_nobody_but_its_owner_may_read_it(tmp_path: Path) -> None:
    with path_of_its_own(tmp_path / "home" / "decisions", "gateway") as path:
        with DecisionLog(path, max_bytes=4_000) as log:
            for number in range(2_000):
                log.put(over(f"r{number}"))
        found = [path.parent.parent, path.parent, *path.parent.iterdir()]
        assert len(found) > 4, "its lock and more than one file"
        assert {each.name: each.stat().st_mode & 0o077 for each in found} == dict.fromkeys((f.name for f in found), 0)


def test_the_rule_and_the_version_that_a_request_fell_to_are_in_the_log(tmp_path: Path) -> None:
    with providing() as one, providing() as two, DecisionLog(tmp_path / "d") as log:
        pools = {
            "small": ModelSettings(versions={"v1": {"replicas": [one.url], "weight": 1}}),
            "big": ModelSettings(replicas=[two.url]),
            "auto": ModelSettings(
                rules=[{"name": "short", "max_prompt_tokens": 200, "to": "small"}], default="big", aliases=["best"]
            ),
        }
        with running_gateway(pools=pools, recorder=GatewayRecorder(decisions=log)) as gateway:
            for model, text in (("best", "hi"), ("auto", "word " * 500), ("small", "hi"), ("small@v1", "hi")):
                messages: Any = [{"role": "user", "content": text}]
                gateway.openai.chat.completions.create(model=model, messages=messages, max_tokens=5)
    found = [recorded.decisions[0] for recorded in read_decisions(tmp_path / "d")]
    assert [(one.route, one.model, one.version, one.rule) for one in found] == [
        ("auto", "small@v1", "v1", "short->small"),
        ("auto", "big", "", "default->big"),
        ("small", "small@v1", "v1", ""),
        ("small@v1", "small@v1", "v1", ""),
    ]


def test_the_second_leg_of_a_choice_is_written_down_or_why_there_is_none(tmp_path: Path) -> None:
    request, choice = choose(1)
    assert choice.replica is not None
    source = Source(choice.replica, SourceReason.PREFILL, 800, 900, 1, 0.5, 0.25)
    with DecisionLog(tmp_path / "d") as log:
        for one in (
            choice,
            msgspec.structs.replace(choice, alone=Alone.NO_GAIN),
            msgspec.structs.replace(choice, source=source),
        ):
            log.decided(request, one, now=5.0)
    read = [one for one in read_entries(tmp_path / "d") if isinstance(one, Decided)]
    legs = [(one.source, one.why, one.pulled_tokens, one.gain_s) for one in read]
    assert legs == [("", "", 0, 0.0), ("", "no_gain", 0, 0.0), (choice.replica.id, "prefill", 800, 0.25)]
