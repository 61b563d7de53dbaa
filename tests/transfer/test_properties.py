"""Two engines that pull KV blocks from each other over a network that delays, reorders, repeats and cuts: no order of
events gives a wrong token, a block with other content than its hash says, a block that nobody gives back, or a request
that waits for ever."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.request import KvSource, Priority, Request
from penstock.engine.fake import fake_token
from tests.examples import examples
from tests.transfer.fakes import FakeWeb
from tests.transfer.peers import VOCAB, Peer

SEEDS = st.integers(0, 1 << 30)
NAMES = ("a", "b")


class TransferMachine(RuleBasedStateMachine):
    @initialize(
        seed=SEEDS, num_blocks=st.integers(12, 24), overlaps=st.booleans(), host_blocks=st.sampled_from([0, 20])
    )
    def start(self, seed: int, num_blocks: int, overlaps: bool, host_blocks: int) -> None:
        self.web = FakeWeb(random.Random(seed))
        self.shape = (num_blocks, host_blocks, overlaps)
        self.peers = {name: self._peer(name) for name in NAMES}
        self.count = 0
        self.now = 0.0

    def _peer(self, name: str) -> Peer:
        num_blocks, host_blocks, overlaps = self.shape
        return Peer(self.web, name, num_blocks, host_blocks, overlaps=overlaps)

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        dice = random.Random(seed)
        prompt = [0] * dice.randint(1, 24) + dice.choice([[], [1], [1, 0, 1], [dice.randrange(9) for _ in range(8)]])
        peer = self.peers[dice.choice(NAMES)]
        other = dice.choice([name for name in NAMES if name != peer.name] * 4 + ["nobody"])
        self.count += 1
        output: list[int] = []
        max_tokens = dice.randint(1, 8)
        for _ in range(min(dice.choice([0, 0, 3]), max_tokens - 1)):
            output.append(fake_token([*prompt, *output], VOCAB))
        request = Request(
            f"r{self.count}",
            prompt,
            max_tokens,
            namespace=dice.choice(["", "", "other"]),
            priority=dice.choice(list(Priority)),
            output_ids=output,
            tenant=dice.choice(["", "t"]),
            is_resumed=bool(output),
            kv_source=dice.choice([None, KvSource(other), KvSource(other, prefills=True)]),
        )
        peer.submit(request, self.now, steps=dice.random() < 0.5)

    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        dice = random.Random(seed)
        peer = self.peers[dice.choice(NAMES)]
        if peer.open:
            peer.abort(dice.choice(sorted(peer.open)), self.now, steps=dice.random() < 0.3)

    @rule(seed=SEEDS)
    def go_on(self, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(dice.randint(1, 8)):
            self.web.deliver(dice.randint(0, 4))
            self.now += dice.choice([0.001, 0.04, 0.6])
            for name in dice.sample(NAMES, 2):
                self.peers[name].turn([], self.now, steps=dice.random() < 0.6)

    @rule(seed=SEEDS)
    def stand_still(self, seed: int) -> None:
        """Nothing arrives, and nobody steps: leases and patience end."""
        self.now += random.Random(seed).choice([11.0, 31.0, 121.0])

    @rule(seed=SEEDS)
    def cut(self, seed: int) -> None:
        dice = random.Random(seed)
        if connections := self.peers[dice.choice(NAMES)].network.connections:
            self.web.cut(dice.choice(connections))

    @rule(seed=SEEDS)
    def crash(self, seed: int) -> None:
        """A process dies, and another one comes in its place: its clients are gone."""
        if random.Random(seed).random() < 0.5:
            return
        name = random.Random(seed).choice(NAMES)
        for connection in self.peers[name].network.connections:
            self.web.cut(connection)
        self.peers[name] = self._peer(name)

    @precondition(lambda self: hasattr(self, "peers"))
    @rule(seed=SEEDS)
    def many_things(self, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(15):
            act = dice.choice([self.submit] * 4 + [self.go_on] * 6 + [self.abort, self.cut, self.stand_still])
            act(dice.randrange(1 << 30))
            self.contents_are_what_their_hashes_say()

    @invariant()
    def contents_are_what_their_hashes_say(self) -> None:
        for peer in getattr(self, "peers", {}).values():
            peer.check_contents()

    def teardown(self) -> None:
        if not hasattr(self, "peers"):
            return
        for _ in range(3000):
            if all(peer.engine.is_idle for peer in self.peers.values()) and not self.web.flights:
                break
            self.web.deliver(8)
            self.now += 0.01
            for peer in self.peers.values():
                peer.turn([], self.now)
        for peer in self.peers.values():
            assert not peer.open, f"{sorted(peer.open)} never ended on {peer.name}"
            peer.check_contents()
            peer.check_idle()


TestTransfer = TransferMachine.TestCase
TestTransfer.settings = settings(max_examples=examples(40), stateful_step_count=12)


def test_long_random_traffic_never_gives_a_wrong_token_nor_leaks_a_block() -> None:
    """Hypothesis tries short histories and makes them shorter; caches fill up in long ones."""
    num_pulled = 0
    for seed in range(12):
        dice, machine = random.Random(seed), TransferMachine()
        machine.start(seed, dice.randint(12, 24), bool(seed % 2), dice.choice([0, 20]))
        for _ in range(10):
            machine.many_things(dice.randrange(1 << 30))
        machine.teardown()
        num_pulled += sum(peer.exchange.totals.pulled_tokens for peer in machine.peers.values())
    assert num_pulled > 100, "little was pulled: the test tries nothing"
