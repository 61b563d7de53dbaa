from __future__ import annotations

from penstock.gateway.proxy.direct_request import Collected, DirectRequest
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.rollouts.load import LoadMeter
from penstock.http.upstream import Upstream
from tests.clocks import ManualClock


def request() -> DirectRequest:
    return DirectRequest(Collected(), lambda ending, outcome: None)


def replica_at(clock: ManualClock) -> Replica:
    return Replica("http://127.0.0.1:1", model="m", upstream=Upstream("127.0.0.1", 1, clock=clock))


def test_the_load_of_an_answer_is_its_mean_and_not_what_was_there_when_it_was_sent() -> None:
    clock = ManualClock()
    replica, own = replica_at(clock), request()
    meter = LoadMeter(replica, 0)
    replica.attach(own)
    clock.now_s += 2.0
    others = [request() for _ in range(8)]
    for one in others:
        replica.attach(one)
    clock.now_s += 2.0
    assert meter.mean(is_counted=True) == 4
    for one in others:
        replica.detach(one)
    clock.now_s += 4.0
    assert meter.mean(is_counted=True) == 2


def test_requests_of_other_gateways_are_taken_to_stay() -> None:
    clock = ManualClock()
    replica = replica_at(clock)
    replica.attach(request())
    meter = LoadMeter(replica, 6)
    assert meter.mean(is_counted=False) == 6, "nothing has passed yet"
    clock.now_s += 1.0
    assert meter.mean(is_counted=False) == 6
    replica.attach(request())
    clock.now_s += 1.0
    replica.attach(request())
    clock.now_s += 1.0
    assert meter.mean(is_counted=False) == 7
