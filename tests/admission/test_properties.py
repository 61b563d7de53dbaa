"""No order of asking, finishing, failing and reporting loses a request, answers one twice, overfills a replica or a
queue, lets requests overtake one of their own tenant of about their size or together by more than that one costs, or
leaves one waiting for ever."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.admission.admission import Admission, Used
from penstock.admission.decision import Admit, Decision, Queued, Shed
from penstock.admission.ledger import expected_cost
from penstock.admission.queue import SHORT_FACTOR
from penstock.admission.settings import AdmissionSettings, ClassRules
from penstock.core.replica import ReplicaState
from penstock.core.request import Priority
from penstock.router.request import EdgeRequest
from tests.examples import examples
from tests.snapshots import snapshot

MAX_LENGTH, MAX_SEQUENCES, KV = 3, 4, 1000
CLASSES = {
    Priority.HIGH: ClassRules(MAX_LENGTH, max_wait_s=20.0, aging_s=1.0, reserved=0.25),
    Priority.NORMAL: ClassRules(MAX_LENGTH, max_wait_s=30.0, aging_s=2.0, reserved=0.1, kv_pressure=4.0),
    Priority.LOW: ClassRules(MAX_LENGTH, max_wait_s=60.0, aging_s=4.0, kv_pressure=2.0),
}
names = st.sampled_from(["a", "b"])


class AdmissionMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.admission = Admission(settings=AdmissionSettings(classes=CLASSES, max_promises=5))
        self.there: dict[str, dict[str, EdgeRequest]] = {"a": {}, "b": {}}
        self.waiting: dict[str, EdgeRequest] = {}  # in order of arrival
        self.answered: set[str] = set()
        self.overtaken: Counter[str] = Counter()  # cost of what came later and was sent before
        self.count = 0
        for name in self.there:
            self.report(name, ReplicaState.READY)

    def tick(self) -> None:
        self.now += 0.001

    def record(self, decision: Decision) -> None:
        request = decision.request
        if isinstance(decision, Queued):
            assert request.id not in self.answered
            self.waiting[request.id] = request
            return
        assert request.id not in self.answered, "answered twice"
        self.answered.add(request.id)
        self.waiting.pop(request.id, None)
        if isinstance(decision, Admit):
            own = [w for w in self.waiting.values() if (w.tenant, w.priority) == (request.tenant, request.priority)]
            for passed in (w for w in own if int(w.id) < int(request.id)):
                assert SHORT_FACTOR * expected_cost(request) <= expected_cost(passed), "overtook one of its own size"
                self.overtaken[passed.id] += expected_cost(request)
                assert self.overtaken[passed.id] <= expected_cost(passed), "overtaken by more than it costs"
            self.there[decision.replica_id][request.id] = request
        elif isinstance(decision, Shed):
            assert decision.retry_after_s is None or decision.retry_after_s > 0

    def poll(self) -> None:
        for decision in self.admission.poll(self.now):
            self.record(decision)

    @rule(
        tenant=st.sampled_from(["x", "y", "z"]),
        priority=st.sampled_from(Priority),
        prompt=st.integers(1, 300),
        output=st.integers(1, 300),
        fingerprint=st.integers(0, 3),
        random01=st.floats(0, 1, exclude_max=True),
        patience=st.none() | st.floats(0.01, 10),
    )
    def ask(
        self,
        tenant: str,
        priority: Priority,
        prompt: int,
        output: int,
        fingerprint: int,
        random01: float,
        patience: float | None,
    ) -> None:
        self.tick()
        self.count += 1
        deadline = None if patience is None else self.now + patience
        request = EdgeRequest(
            str(self.count), "m", prompt, output, tenant, priority, None, deadline, random01, fingerprint
        )
        self.record(self.admission.submit(request, self.now))
        self.poll()

    def running(self) -> list[tuple[str, str]]:
        return [(name, request_id) for name, requests in self.there.items() for request_id in requests]

    @precondition(lambda self: any(self.there.values()))
    @rule(data=st.data(), share=st.floats(0, 1))
    def finish(self, data: st.DataObject, share: float) -> None:
        self.tick()
        name, request_id = data.draw(st.sampled_from(sorted(self.running())))
        request = self.there[name].pop(request_id)
        entry = self.admission.finished(
            request_id, self.now, Used(request.prompt_tokens, int(share * request.max_tokens))
        )
        assert entry is not None
        assert entry.replica_id == name
        assert self.admission.finished(request_id, self.now) is None, "settled twice"
        self.poll()

    @precondition(lambda self: any(self.there.values()))
    @rule(data=st.data())
    def make_a_first_token(self, data: st.DataObject) -> None:
        self.tick()
        self.admission.started(data.draw(st.sampled_from(sorted(self.running())))[1], self.now)
        self.poll()

    @precondition(lambda self: any(self.there.values()))
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self.tick()
        name, request_id = data.draw(st.sampled_from(sorted(self.running())))
        other = "b" if name == "a" else "a"
        if len(self.there[other]) < MAX_SEQUENCES:
            choice = self.admission.reroute(request_id, self.now, frozenset({name}), known_tokens=10)
            if choice is not None:
                assert choice.replica is not None
                assert choice.replica.id == other
                self.there[other][request_id] = self.there[name].pop(request_id)
        self.poll()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.tick()
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.admission.finished(request_id, self.now) is None
        self.answered.add(request_id)
        del self.waiting[request_id]

    @rule(name=names, state=st.sampled_from([ReplicaState.READY] * 3 + [ReplicaState.OUT, ReplicaState.DRAINING]))
    def report(self, name: str, state: ReplicaState) -> None:
        self.tick()
        requests = self.there[name].values()
        seen = snapshot(
            id=name,
            models=("m",),
            taken_at=self.now,
            max_num_seqs=MAX_SEQUENCES,
            kv_capacity_tokens=KV,
            num_running=len(requests),
            kv_active_tokens=sum(r.prompt_tokens for r in requests),
            state=state,
            mean_output_tokens=100.0,
            chunk_tokens=500,
        )
        self.admission.replica_changed(seen)
        self.poll()

    @rule(seconds=st.floats(0.01, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.poll()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.admission.num_waiting("m") == len(self.waiting)
        assert self.admission.num_open == sum(map(len, self.there.values()))

    @invariant()
    def nothing_is_overfull(self) -> None:
        for requests in self.there.values():
            assert len(requests) <= MAX_SEQUENCES
        for priority in Priority:
            assert sum(r.priority is priority for r in self.waiting.values()) <= 2 * MAX_LENGTH

    def teardown(self) -> None:
        """With replicas that work, everyone who waits is sent or told, within the longest patience."""
        for _ in range(70):
            for name, request_id in self.running():
                del self.there[name][request_id]
                assert self.admission.finished(request_id, self.now) is not None
            self.poll()
            for name in self.there:
                self.report(name, ReplicaState.READY)
            self.now += 1.0
        assert not self.waiting


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=examples(50), stateful_step_count=40)
