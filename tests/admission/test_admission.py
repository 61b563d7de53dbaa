import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.admission.admission import Admission, Used
from penstock.admission.decision import Admit, Queued, Shed, ShedReason
from penstock.admission.settings import AdmissionSettings, ClassRules
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.core.request import Priority
from penstock.core.slo import Slo
from penstock.router.request import EdgeRequest
from tests.snapshots import snapshot

ids = itertools.count()


def request(tenant: str = "", prompt: int = 100, output: int = 100, **facts: Any) -> EdgeRequest:
    return EdgeRequest(f"q{next(ids)}", "m", prompt, output, tenant, **facts)


def replica(name: str = "a", **facts: Any) -> ReplicaSnapshot:
    given = {"models": ("m",), "max_num_seqs": 2, "kv_capacity_tokens": 10_000, "mean_output_tokens": 100.0, **facts}
    return snapshot(id=name, **given)


def door(*replicas: ReplicaSnapshot, **settings: Any) -> Admission:
    admission = Admission(settings=AdmissionSettings(**settings))
    for each in replicas or (replica(),):
        admission.replica_changed(each)
    return admission


def fill(admission: Admission, count: int = 2) -> list[str]:
    decisions = [admission.submit(request(), 0.0) for _ in range(count)]
    assert all(isinstance(decision, Admit) for decision in decisions)
    return [decision.request.id for decision in decisions]


def sent(admission: Admission, now: float) -> list[str]:
    return [decision.request.id for decision in admission.poll(now) if isinstance(decision, Admit)]


def test_an_admission_says_where_to_and_how_long_to_the_first_token() -> None:
    decision = door(replica(prefill_tokens_per_s=1000.0)).submit(request(), 0.0)
    assert isinstance(decision, Admit)
    assert decision.replica_id == "a"
    assert decision.predicted_ttft_s == pytest.approx(0.1)


def test_what_fits_no_replica_is_told_not_to_come_back() -> None:
    decision = door().submit(request(prompt=9_000, output=2_000), 0.0)
    assert isinstance(decision, Shed)
    assert (decision.reason, decision.retry_after_s) == (ShedReason.TOO_LARGE, None)


def test_what_fits_only_a_replica_that_is_out_may_come_back() -> None:
    admission = door(replica("small", kv_capacity_tokens=500), replica("large", state=ReplicaState.OUT))
    decision = admission.submit(request(prompt=2_000), 0.0)
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.NO_REPLICA


def test_without_a_replica_there_is_no_queue() -> None:
    decision = door(replica(state=ReplicaState.OUT)).submit(request(), 0.0)
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.NO_REPLICA
    assert decision.retry_after_s


def test_who_waits_is_sent_when_a_place_is_free() -> None:
    admission = door()
    first, _ = fill(admission)
    waiting = request()
    assert isinstance(admission.submit(waiting, 1.0), Queued)
    assert admission.poll(2.0) == []
    admission.finished(first, 3.0, Used(100, 10))
    (decision,) = admission.poll(3.0)
    assert isinstance(decision, Admit)
    assert decision.request is waiting
    assert decision.waited_s == 2.0


@pytest.mark.parametrize("limits", [{"kv_capacity_tokens": 450}, {"chunk_tokens": 200}, {"max_num_seqs": 2}])
def test_kv_prefill_and_places_each_hold_work_back(limits: dict[str, Any]) -> None:
    admission = door(replica(**{"max_num_seqs": 9, **limits}))
    fill(admission)
    assert isinstance(admission.submit(request(), 0.0), Queued)


def test_a_prompt_that_was_computed_makes_room_for_the_next() -> None:
    admission = door(replica(max_num_seqs=9, chunk_tokens=100))
    (first,) = fill(admission, 1)
    waiting = request()
    admission.submit(waiting, 0.0)
    admission.started(first, 1.0)
    assert sent(admission, 1.0) == [waiting.id]


def test_a_snapshot_replaces_what_it_counts_and_keeps_what_came_after() -> None:
    admission = door(replica(max_num_seqs=9))
    admission.submit(request(), 1.0)
    admission.submit(request(), 3.0)
    admission.replica_changed(replica(max_num_seqs=9, taken_at=2.0, num_running=1, kv_active_tokens=150))
    (now,) = admission.replicas("m")
    assert (now.sequences, now.prefill_queued) == (2, 100)
    assert now.kv_used_tokens == 150 + 50 + 200


def test_classes_go_in_order_and_first_come_first_served_inside() -> None:
    admission = door(in_use_s=0.5)
    running = fill(admission)
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.HIGH]
    waiting = [request(priority=priority) for priority in order]
    for each in waiting:
        admission.submit(each, 0.0)
    left = []
    for _ in range(4):
        admission.finished(running.pop(0), 1.0)
        running += (now_sent := sent(admission, 1.0))
        left += now_sent
    assert left == [waiting[i].id for i in (2, 4, 1, 3)]


def test_tenants_take_turns_by_what_they_were_given() -> None:
    admission = door(replica(max_num_seqs=1))
    (running,) = fill(admission, 1)
    greedy = [request("greedy") for _ in range(4)]
    modest = [request("modest", prompt=50, output=50) for _ in range(4)]
    for each in (*greedy, *modest):
        admission.submit(each, 0.0)
    order = []
    for _ in range(8):
        is_modest = running in {each.id for each in modest}
        admission.finished(running, 1.0, Used(50, 50) if is_modest else Used(100, 100))
        (running,) = sent(admission, 1.0)
        order.append("g" if running in {each.id for each in greedy} else "m")
    assert "".join(order[:6]).count("m") == 4  # half the size, twice as often


def test_a_tenant_whose_answers_are_longer_than_expected_pays_for_them_with_its_next_turns() -> None:
    admission = door(replica(max_num_seqs=1))
    (running,) = fill(admission, 1)
    long = [request("long", output=100, expected_output=10) for _ in range(4)]
    plain = [request("plain", output=10) for _ in range(8)]
    for each in (*long, *plain):
        admission.submit(each, 0.0)
    order = []
    for _ in range(6):
        is_long = running in {each.id for each in long}
        admission.finished(running, 1.0, Used(100, 100) if is_long else Used(100, 10))
        (running,) = sent(admission, 1.0)
        order.append("l" if running in {each.id for each in long} else "p")
    assert order.count("p") == 4


def test_an_output_that_nobody_limits_counts_as_what_is_expected_of_it() -> None:
    """Else one chat without a limit would fill a replica, by its context alone."""
    admission = door(replica(max_num_seqs=64, kv_capacity_tokens=4000, max_model_len=4000))
    for _ in range(10):
        assert isinstance(admission.submit(request(output=3800, expected_output=100, context_tokens=101), 0.0), Admit)


def test_what_was_reserved_and_not_used_is_given_back_to_the_tenant() -> None:
    admission = door(replica(max_num_seqs=1))
    (running,) = fill(admission, 1)
    short, long = [request("short") for _ in range(4)], [request("long") for _ in range(4)]
    for each in (*short, *long):
        admission.submit(each, 0.0)
    order = []
    for _ in range(6):
        is_short = running in {each.id for each in short}
        admission.finished(running, 1.0, Used(100, 0 if is_short else 100))
        (running,) = sent(admission, 1.0)
        order.append(running in {each.id for each in short})
    assert sum(order) > 3


def test_an_overdue_request_goes_before_higher_classes_but_not_all_of_them() -> None:
    admission = door(replica(max_num_seqs=1, taken_at=130.0), in_use_s=0.0)
    (running,) = fill(admission, 1)
    for _ in range(20):
        admission.submit(request(priority=Priority.LOW), 0.0)
    low_sent = 0
    for i in range(40):
        now = 130.0 + 0.01 * i
        admission.submit(request(priority=Priority.HIGH), now)
        admission.finished(running, now)
        (decision,) = [d for d in admission.poll(now) if isinstance(d, Admit)]
        running = decision.request.id
        low_sent += decision.request.priority is Priority.LOW
    assert 3 <= low_sent <= 5  # a tenth


def test_places_are_kept_for_a_higher_class_only_while_it_is_in_use() -> None:
    def batch_that_fits(now: float) -> int:
        return sum(
            isinstance(admission.submit(request(priority=Priority.LOW, prompt=1), now), Admit) for _ in range(10)
        )

    admission = door(replica(max_num_seqs=8, taken_at=0.0))
    assert batch_that_fits(0.0) == 8
    admission = door(replica(max_num_seqs=8))
    admission.finished(fill(admission, 1)[0], 0.0)
    admission.submit(request(priority=Priority.HIGH, prompt=1), 0.0)
    assert batch_that_fits(0.5) == 4  # 0.65 of 8, with the interactive one


def test_a_request_is_refused_when_it_would_wait_past_its_deadline() -> None:
    admission = door(replica(decode_tokens_per_s=10.0))
    fill(admission)
    decision = admission.submit(request(deadline=2.0), 0.0)
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.TOO_SLOW
    assert decision.retry_after_s
    assert decision.retry_after_s >= 1.0


def test_a_deadline_that_passes_in_the_queue_is_an_answer_too() -> None:
    admission = door()
    fill(admission)
    waiting = request(deadline=5.0)
    assert isinstance(admission.submit(waiting, 0.0), Queued)
    assert admission.next_deadline == 5.0
    (decision,) = admission.poll(5.0)
    assert isinstance(decision, Shed)
    assert decision.reason is ShedReason.DEADLINE
    assert admission.finished(waiting.id, 6.0) is None


def test_a_full_queue_refuses_the_greedy_and_makes_place_for_the_modest() -> None:
    rules = {p: ClassRules(max_length=3, max_wait_s=60.0, aging_s=30.0) for p in Priority}
    admission = door(classes=rules)
    fill(admission)
    greedy = [request("greedy", output=length) for length in (100, 300, 200)]
    assert all(isinstance(admission.submit(each, 0.0), Queued) for each in greedy)
    refused = admission.submit(request("greedy"), 0.0)
    assert isinstance(refused, Shed)
    assert refused.reason is ShedReason.QUEUE_FULL
    assert isinstance(admission.submit(request("modest"), 0.0), Queued)
    (decision,) = admission.poll(0.0)
    assert isinstance(decision, Shed)
    assert decision.request is greedy[1]  # the largest
    assert decision.reason is ShedReason.DISPLACED


def test_when_kv_is_tight_long_work_and_low_classes_are_refused_first_and_small_requests_last() -> None:
    def is_refused(pressure: float, **facts: Any) -> bool:
        admission = door(replica(max_num_seqs=99, kv_capacity_tokens=100_000, prefill_tokens_per_s=1e6))
        admission.submit(request(priority=Priority.HIGH, prompt=90_000), 0.0)
        for _ in range(round((pressure - 0.9) * 5)):
            admission.submit(request(priority=Priority.HIGH, prompt=19_000, output=1000), 0.0)
        decision = admission.submit(request(**facts), 0.0)
        return isinstance(decision, Shed) and decision.reason is ShedReason.KV_TIGHT

    batch, standard = {"priority": Priority.LOW, "prompt": 5000}, {"prompt": 5000}
    for long in ({"output": 4000}, {"prompt": 30_000}):  # an answer, or a context
        refused = [
            [is_refused(pressure, **facts) for facts in (batch | long, batch, standard | long, standard)]
            for pressure in (1.1, 1.5, 2.5, 4.5)
        ]
        assert refused == [
            [True, False, False, False],
            [True, False, False, False],
            [True, True, True, False],
            [True, True, True, True],
        ]
        assert not is_refused(4.5, priority=Priority.HIGH, **long)
    assert [is_refused(pressure) for pressure in (4.5, 15.0, 17.0)] == [False, False, True]  # a chat: the last to go
    assert [is_refused(pressure, priority=Priority.LOW) for pressure in (4.5, 7.0, 9.0)] == [False, False, True]


def test_chats_wait_while_long_contexts_are_shed_and_the_queue_stays_bounded() -> None:
    admission = door(replica(max_num_seqs=99, kv_capacity_tokens=16_384, prefill_tokens_per_s=1e6))
    shed, num_chats = Counter[str](), 0
    for number in range(60):
        for asked in (request("reader", 8000, 60), *(request("chatter", 30, 40) for _ in range(10))):
            decision = admission.submit(asked, 0.0)
            num_chats += asked.tenant == "chatter"
            if isinstance(decision, Shed):
                shed[f"{asked.tenant} {decision.reason}"] += 1
        assert admission.num_waiting("m") <= AdmissionSettings().classes[Priority.NORMAL].max_length, number
    assert shed["reader kv_tight"] >= 55
    assert not shed["chatter kv_tight"]
    assert sum(shed.values()) - shed["reader kv_tight"] < num_chats / 2


@pytest.mark.parametrize(
    ("ttft_s", "expected"),
    [(0.5, [Queued, Queued, Queued]), (0.1, [Shed, Queued, Queued]), (0.02, [Shed, Shed, Queued])],
)
def test_who_would_wait_hopelessly_beyond_the_models_objective_is_refused_and_batch_waits(
    ttft_s: float, expected: list[type]
) -> None:
    """About ten seconds for each."""
    for priority, kind in zip(Priority, expected, strict=True):
        admission = Admission(slos={"m": Slo(ttft_s=ttft_s), "another": Slo(ttft_s=1e-3)})
        admission.replica_changed(replica(decode_tokens_per_s=10.0))
        fill(admission)
        decision = admission.submit(request(priority=priority), 0.0)
        assert isinstance(decision, kind), priority
        if isinstance(decision, Shed):
            assert decision.reason is ShedReason.TOO_SLOW
            assert decision.retry_after_s


def test_a_classs_own_patience_goes_before_the_objective() -> None:
    rules = {p: replace(rule, max_wait_s=60.0) for p, rule in AdmissionSettings().classes.items()}
    admission = Admission(settings=AdmissionSettings(classes=rules), slos={"m": Slo(ttft_s=0.02)})
    admission.replica_changed(replica(decode_tokens_per_s=10.0))
    fill(admission)
    assert isinstance(admission.submit(request(priority=Priority.HIGH), 0.0), Queued)


def test_a_kept_place_is_for_who_was_told_and_told_again_the_same_if_early() -> None:
    admission = door(replica(decode_tokens_per_s=10.0))
    fill(admission)
    asked = request(deadline=3.0, fingerprint=7)
    first = admission.submit(asked, 0.0)
    assert isinstance(first, Shed)
    assert first.retry_after_s
    again = admission.submit(request(deadline=3.2, fingerprint=7), 0.2)
    assert isinstance(again, Shed)
    assert again.retry_after_s == pytest.approx(first.retry_after_s - 0.2)
    now = first.retry_after_s
    assert isinstance(admission.submit(request(deadline=now + 3, fingerprint=8), now), Shed)
    assert isinstance(admission.submit(request(deadline=now + 3, fingerprint=7), now), Queued)


def test_an_entry_is_settled_once() -> None:
    admission = door()
    decision = admission.submit(request(), 0.0)
    entry = admission.finished(decision.request.id, 1.0, Used(100, 20))
    assert entry is not None
    assert (entry.replica_id, entry.request.kv_tokens) == ("a", 200)
    assert admission.finished(decision.request.id, 2.0, Used(100, 20)) is None
    assert admission.replicas("m")[0].sequences == 0


def test_an_admitted_request_moves_without_waiting_again() -> None:
    admission = door(replica("a"), replica("b"))
    decision = admission.submit(request(), 0.0)
    assert isinstance(decision, Admit)
    here = decision.replica_id
    there = "b" if here == "a" else "a"
    fill(admission, 3)  # no room anywhere
    choice = admission.reroute(decision.request.id, 1.0, frozenset({here}), known_tokens=150)
    assert choice is not None
    assert choice.replica is not None
    assert choice.replica.id == there
    assert {r.id: r.sequences for r in admission.replicas("m")} == {here: 1, there: 3}
    assert admission.reroute(decision.request.id, 2.0, frozenset({"a", "b"}), known_tokens=150) is None
    admission.finished(decision.request.id, 3.0)
    assert {r.id: r.sequences for r in admission.replicas("m")} == {here: 1, there: 2}


def test_what_has_begun_goes_to_a_replica_with_an_open_breaker_rather_than_nowhere() -> None:
    admission = door(replica("a"), replica("b", is_tripped=True))
    (id,) = fill(admission, 1)
    assert admission.reroute(id, 1.0, frozenset({"a"}), known_tokens=150) is None
    choice = admission.reroute(id, 1.0, frozenset({"a"}), known_tokens=150, is_begun=True)
    assert choice is not None
    assert choice.replica is not None
    assert choice.replica.id == "b"
    assert admission.reroute(id, 2.0, frozenset({"a", "b"}), known_tokens=150, is_begun=True) is None


def test_a_request_of_many_caches_worth_does_not_have_the_others_refused() -> None:
    """It is computed in turns, so that it fills no more than a cache at a time: many prompts in one request, say."""
    admission = door(replica(), replica("b"))
    for _ in range(2):
        assert isinstance(admission.submit(request(prompt=1_000_000, output=10, context_tokens=100), 0.0), Admit)
    decision = admission.submit(request("other"), 0.0)
    assert isinstance(decision, Queued), decision
