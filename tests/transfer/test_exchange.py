"""What two engines do with a pull, step by step, over a network that delivers when the test says so."""

from __future__ import annotations

import random
from collections.abc import Callable

from penstock.core.request import AdapterRef, KvSource, Request
from penstock.engine.messages import Park
from penstock.transfer.lending import LEASE_S
from penstock.transfer.pulling import MAX_ROOM_S, MAX_STALL_S
from tests.transfer.fakes import FakeWeb
from tests.transfer.peers import Peer

FROM_B, COMPUTED_BY_B = KvSource("b"), KvSource("b", prefills=True)


def web() -> FakeWeb:
    return FakeWeb(random.Random(7))


def ask(name: str, num_tokens: int, source: KvSource | None = None, **other: object) -> Request:
    prompt = [1 + i % 40 for i in range(num_tokens)]
    return Request(name, prompt, max_tokens=2, kv_source=source, **other)  # type: ignore[arg-type]


def settle(
    network: FakeWeb, *peers: Peer, now: float = 0.0, tick_s: float = 0.0, until: Callable[[], bool] | None = None
) -> None:
    """Let everything arrive and everybody work, until nobody has anything to do."""
    for _ in range(400):
        network.deliver(20)
        for peer in peers:
            peer.turn([], now)
        now += tick_s
        if until is not None and until():
            return
        if until is None and not network.flights and all(peer.engine.is_idle for peer in peers):
            return
    raise AssertionError("it never ended")


def test_a_prompt_that_another_engine_computes_is_pulled_and_its_cost_and_time_are_told() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    a.submit(ask("r", 30, COMPUTED_BY_B), 0.0)
    settle(net, a, b, now=1.0, tick_s=1.0)
    client, totals = a.ended["r"], a.exchange.totals
    assert (totals.pulls, totals.failed_pulls, totals.pulled_tokens) == (1, 0, 28)
    assert b.exchange.totals.lent_tokens == 28
    assert client.timings is not None
    assert client.timings.pull_s >= 3.0, "the other engine needed three steps, of a second each"
    assert client.timings.pulled_tokens == 28
    assert client.timings.queue_s == 0.0
    assert client.cached_tokens == 0, "computed for this request, if elsewhere"
    assert client.device_s >= 3.0, "these steps are its client's, and its own"
    a.check_idle(), b.check_idle()


def test_blocks_that_are_there_are_pulled_and_count_as_cached() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    b.submit(ask("warm", 30), 0.0)
    settle(net, a, b)
    a.submit(ask("r", 30, FROM_B), 0.0)
    settle(net, a, b, now=0.5)
    assert a.exchange.totals.pulled_tokens == 28
    assert a.ended["r"].cached_tokens == 28
    assert a.exchange.pull_tokens_per_s == 28 / 0.5
    a.check_idle(), b.check_idle()


def test_blocks_that_a_step_in_flight_may_write_to_are_not_landed_in_before_it_has_ended() -> None:
    """A device computes when it gets to it: blocks of a sequence that was aborted meanwhile are still written."""
    net = web()
    a, b = Peer(net, "a", 8, overlaps=True), Peer(net, "b", 32)
    b.submit(ask("warm", 21), 0.0)
    settle(net, a, b)
    a.submit(Request("other", [45] * 12, max_tokens=9), 0.0)  # its step is in flight
    assert a.engine.in_flight
    a.abort("other", 0.0, steps=False)
    a.submit(ask("r", 21, FROM_B), 0.0, steps=False)
    for _ in range(10):
        net.deliver(50)
        a.turn([], 0.0, steps=False)
        b.turn([], 0.0)
    assert a.exchange.totals.pulled_tokens == 0
    settle(net, a, b)
    a.check_contents()
    assert a.exchange.totals.pulled_tokens == 20
    assert len(a.ended["r"].output) == 2


def test_a_block_that_a_step_has_still_to_copy_from_the_host_is_not_lent() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 8, 16, overlaps=True)
    b.submit(ask("warm", 29), 0.0)
    settle(net, a, b)
    b.submit(Request("other", [45] * 29, max_tokens=2), 0.0)  # the first is on the host now
    settle(net, a, b)
    b.submit(ask("again", 29), 0.0)  # its blocks are found at once, and copied by the step in flight
    assert b.engine.in_flight
    a.submit(ask("r", 29, FROM_B), 0.0)
    for _ in range(10):
        net.deliver(50)
        b.turn([], 0.0, steps=False)
        a.turn([], 0.0)
    settle(net, a, b)
    a.check_contents()
    assert len(a.ended["r"].output) == 2


def test_a_sequence_that_has_its_blocks_does_not_stand_behind_one_that_needs_them() -> None:
    """The first in line needs more blocks than the pulled ones leave, and these wait for their places behind it."""
    net = web()
    a, b = Peer(net, "a", 16, max_num_seqs=1), Peer(net, "b", 32)
    b.submit(ask("warm", 33), 0.0)
    settle(net, a, b)
    a.submit(Request("running", [44] * 5, max_tokens=12), 0.0)
    a.submit(Request("large", [43] * 50, max_tokens=4), 0.0)
    a.submit(ask("r", 33, FROM_B), 0.0)
    settle(net, a, b)
    assert sorted(a.ended) == ["large", "r", "running"]
    a.check_idle(), b.check_idle()


def test_others_do_not_wait_behind_sequences_that_pull() -> None:
    net = web()
    a, b = Peer(net, "a", 64), Peer(net, "b", 32)
    for number in range(70):  # more than the scheduler looks past
        a.submit(Request(f"p{number}", [number % 40, number // 40] + [3] * 20, 2, kv_source=FROM_B), 0.0)
    a.submit(Request("quick", [45], max_tokens=1), 0.0)
    for _ in range(5):
        a.turn([], 0.0)
    assert "quick" in a.ended
    assert a.engine.load().num_waiting >= 60
    settle(net, a, b)
    a.check_idle(), b.check_idle()


def test_a_pull_that_finds_no_room_goes_to_the_queue_after_a_while() -> None:
    net = web()
    a, b = Peer(net, "a", 8), Peer(net, "b", 32)
    b.submit(ask("warm", 21), 0.0)
    settle(net, a, b)
    a.submit(Request("long", [44] * 17, max_tokens=14), 0.0)
    a.submit(ask("r", 21, FROM_B), 0.0, steps=False)
    net.deliver(50)
    b.turn([], 0.0)
    a.turn([], MAX_ROOM_S + 1, steps=False)
    settle(net, a, b, now=MAX_ROOM_S + 1)
    assert sorted(a.ended) == ["long", "r"]
    assert a.exchange.totals.failed_pulls == 1
    a.check_idle(), b.check_idle()


def test_a_pull_from_a_lively_engine_that_sends_nothing_ends_after_a_while() -> None:
    """It says that it works on it, for ever."""
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32, max_num_seqs=1)
    b.submit(Request("first", [45] * 3, max_tokens=100), 0.0)
    now = 0.0
    a.submit(ask("r", 21, COMPUTED_BY_B), now)
    while "r" not in a.ended:
        now += 1.0
        net.deliver(50)
        b.engine.receive([], now)  # its device does not get to it
        a.turn([], now)
        assert now < MAX_STALL_S + 20
    assert now > MAX_STALL_S
    b.abort("first", now)
    settle(net, a, b, now=now)
    a.check_idle(), b.check_idle()


def test_a_silent_engine_is_given_up() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    a.submit(ask("r", 21, COMPUTED_BY_B), 0.0)
    net.deliver(50)
    a.turn([], 29.0)
    assert a.exchange.has_work
    for step in range(8):  # b stands still
        a.turn([], 31.0 + step)
    assert "r" in a.ended
    settle(net, a, b, now=40.0)
    a.check_idle(), b.check_idle()


def test_two_engines_that_ask_each_other_for_the_same_prompt_both_answer() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    a.submit(ask("r", 30, KvSource("b", prefills=True)), 0.0)
    b.submit(ask("s", 30, KvSource("a", prefills=True)), 0.0)
    settle(net, a, b)
    assert list(a.ended) == ["r"]
    assert list(b.ended) == ["s"]


def test_an_abort_reaches_the_engine_that_computes() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    a.submit(ask("r", 60, COMPUTED_BY_B), 0.0)
    settle(net, a, b, until=lambda: b.engine.scheduler.has_work)
    a.abort("r", 0.0)
    assert a.exchange.has_work, "its blocks are held until nobody writes there"
    settle(net, a, b, until=lambda: not b.engine.scheduler.has_work)
    settle(net, a, b)
    a.check_idle(), b.check_idle()


def test_what_is_asked_and_dropped_before_the_engine_looks_is_never_begun() -> None:
    """As it is with an engine that stood still for a while."""
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    a.submit(ask("r", 60, COMPUTED_BY_B), 0.0)
    a.abort("r", 0.0)
    net.deliver(20)
    b.turn([], 0.0)
    assert not b.engine.scheduler.has_work
    settle(net, a, b)
    a.check_idle(), b.check_idle()


def test_an_engine_without_steps_reports_that_it_lends_no_longer() -> None:
    """Else its load would be told wrong until somebody asks it for something."""
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    b.submit(ask("warm", 30), 0.0)
    settle(net, a, b)
    a.submit(ask("r", 30, FROM_B), 0.0)
    settle(net, a, b)
    assert b.last_report is not None
    assert b.last_report.measured.load.kv_active_tokens == 0
    assert b.last_report.measured.transfer.lent_tokens == 28


def test_a_lease_that_nobody_renews_ends() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    b.submit(ask("warm", 30), 0.0)
    settle(net, a, b)
    a.submit(ask("r", 30, FROM_B), 0.0, steps=False)
    net.deliver(1)  # and not that there is room
    b.turn([], 1.0)
    assert b.cache.pool.num_free < b.cache.pool.num_blocks
    b.turn([], LEASE_S + 2)
    assert b.cache.pool.num_free == b.cache.pool.num_blocks
    settle(net, a, b, now=LEASE_S + 3)
    assert "r" in a.ended


def test_choices_of_one_prompt_are_pulled_once() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    for name in ("r0", "r1", "r2"):
        a.submit(ask(name, 30, COMPUTED_BY_B), 0.0)
    settle(net, a, b)
    assert a.exchange.totals.pulls == 1
    assert sorted(a.ended) == ["r0", "r1", "r2"]


def test_one_that_waits_for_a_pulled_prefix_computes_it_when_the_pull_is_aborted() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    a.submit(ask("r", 30, COMPUTED_BY_B), 0.0)
    a.submit(ask("s", 30), 0.0)
    a.abort("r", 0.0)
    settle(net, a, b)
    assert list(a.ended) == ["s"]
    a.check_idle(), b.check_idle()


def test_an_engine_that_is_to_be_parked_lends_nothing_more_and_parks() -> None:
    net = web()
    a, b = Peer(net, "a", 32), Peer(net, "b", 32)
    b.submit(ask("warm", 30), 0.0)
    settle(net, a, b)
    a.submit(ask("r", 30, FROM_B), 0.0)
    settle(net, a, b, until=lambda: b.exchange.has_work)
    b.turn([Park()], 0.0)
    a.submit(ask("s", 31, COMPUTED_BY_B), 0.0)
    settle(net, a, b)
    assert b.engine.is_parked
    assert sorted(a.ended) == ["r", "s"]


def test_an_engine_without_adapters_declines_a_prompt_that_has_one_and_lives_on() -> None:
    net = web()
    a, b = Peer(net, "a", 32, num_loras=2), Peer(net, "b", 32)
    a.submit(ask("r", 30, COMPUTED_BY_B, adapter=AdapterRef("digest", "poet")), 0.0, steps=False)
    assert a.exchange.has_work
    for _ in range(10):
        net.deliver(20)
        a.turn([], 0.0, steps=False)
        b.turn([], 0.0)
    assert not a.exchange.has_work
    b.check_idle()


def test_a_lender_never_holds_more_than_half_of_its_cache_and_sends_the_rest_later() -> None:
    net = web()
    a, b = Peer(net, "a", 64), Peer(net, "b", 16)
    b.submit(ask("warm", 57), 0.0)
    settle(net, a, b)
    a.submit(ask("r", 57, FROM_B), 0.0)
    most = 0
    for _ in range(60):
        net.deliver(1)
        b.turn([], 0.0)
        most = max(most, b.cache.pool.num_blocks - b.cache.pool.num_free)
        a.turn([], 0.0)
    settle(net, a, b)
    assert most == 8
    assert a.exchange.totals.pulled_tokens == 56
