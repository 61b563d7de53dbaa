from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.core.slo import Slo
from penstock.router.legs import PULL_OVERHEAD_S, Alone, Held, Source, SourceReason, choose_source, moved_source
from penstock.router.load import Load
from penstock.router.request import EdgeRequest
from penstock.router.router import Router
from tests.snapshots import snapshot

LOAD = Load()
SLO = Slo()


def replica(name: str, **facts: Any) -> ReplicaSnapshot:
    return snapshot(
        name, **{"models": ("m",), "kv_address": f"{name}:7", "kv_layout": "l", "chunk_tokens": 2048, **facts}
    )


def request(tokens: int = 8192, **facts: Any) -> EdgeRequest:
    hashes = tuple(range(1, 1 + tokens // 256))
    return EdgeRequest("q", "m", **{"prompt_tokens": tokens, "max_tokens": 100, "hashes": hashes, **facts})


def chosen(
    picked: ReplicaSnapshot, *peers: ReplicaSnapshot, held: dict[str, Held] | None = None, **facts: Any
) -> Source | Alone:
    split = facts.pop("split", "auto")
    return choose_source(request(**facts), picked, peers, held or {}, LOAD, 0.0, split)


busy = replica("d", num_running=16, num_open=16)
prefiller = replica("p", role="prefill")


def test_a_long_prompt_is_computed_elsewhere_for_the_sake_of_the_answers_under_way() -> None:
    source = chosen(busy, prefiller)
    assert isinstance(source, Source)
    assert (source.replica.id, source.reason, source.prefills) == ("p", SourceReason.PREFILL, True)
    assert (source.computed_tokens, source.pulled_tokens, source.rest_tokens) == (8192, 8191, 1)
    prefill_s, pull_s = 8192 / 2000, 8191 / 10_000
    leg_s = PULL_OVERHEAD_S + prefill_s + pull_s / 4
    rest_s = 1 / 2000
    assert source.ttft_s == pytest.approx(leg_s + rest_s)
    beside = 1 + LOAD.output * 16
    assert source.gain_s == pytest.approx(busy.queue_s + prefill_s * beside - leg_s - rest_s * beside)


def test_where_nobody_decodes_and_nobody_waits_a_prompt_stays() -> None:
    assert chosen(replica("d"), prefiller) is Alone.NO_GAIN


def test_a_queue_at_the_prefill_replica_that_is_longer_than_the_gain_keeps_the_prompt() -> None:
    assert chosen(busy, replica("p", role="prefill", queued_tokens=8000)) is Alone.NO_GAIN


def test_a_queue_where_it_is_answered_passes_while_the_prompt_is_computed_elsewhere() -> None:
    source = chosen(replica("d", queued_tokens=4000), prefiller)
    assert isinstance(source, Source)
    assert source.ttft_s == pytest.approx(PULL_OVERHEAD_S + 8192 / 2000 + 8191 / 10_000 / 4 + 1 / 2000)
    assert source.gain_s == pytest.approx(2.0 + 8192 / 2000 - source.ttft_s)


def test_answers_under_way_at_the_source_weigh_as_those_of_the_replica_that_answers() -> None:
    decoding = replace(busy, role="decode")
    assert chosen(decoding, replica("p", num_running=16, num_open=16)) is Alone.NO_GAIN
    assert isinstance(chosen(decoding, replica("p", role="prefill", num_running=16, num_open=16)), Source)


def test_replicas_with_both_roles_compute_prompts_for_decode_replicas_and_not_for_each_other() -> None:
    idle = replica("p")
    assert chosen(busy, idle) is Alone.NOBODY
    assert isinstance(chosen(replace(busy, role="decode"), idle), Source)
    assert isinstance(chosen(busy, idle, split="always"), Source)
    held = chosen(busy, idle, held={"p": Held(8000)})
    assert isinstance(held, Source)
    assert held.reason is SourceReason.PREFIX


def test_a_prefix_is_pulled_from_who_holds_it_where_that_is_faster_than_to_compute_it() -> None:
    holder = replica("h", role="decode")
    source = chosen(replica("d"), holder, held={"h": Held(6144), "d": Held(1024)})
    assert isinstance(source, Source)
    assert (source.reason, source.prefills, source.computed_tokens) == (SourceReason.PREFIX, False, 0)
    assert (source.pulled_tokens, source.rest_tokens) == (5120, 2048)
    pull_s = PULL_OVERHEAD_S + 5120 / 10_000
    assert source.ttft_s == pytest.approx(pull_s + 2048 / 2000)
    assert source.gain_s == pytest.approx(5120 / 2000 - pull_s)
    slow = replica("d", kv_pull_tokens_per_s=1500.0)
    assert chosen(slow, holder, held={"h": Held(6144), "d": Held(1024)}) is Alone.NO_GAIN


def test_blocks_in_the_holders_host_memory_cost_their_fetch() -> None:
    source, fetched = (
        chosen(replica("d"), replica("h", role="decode"), held={"h": Held(6144, on_host)}) for on_host in (0, 2048)
    )
    assert isinstance(source, Source)
    assert isinstance(fetched, Source)
    assert fetched.ttft_s - source.ttft_s == pytest.approx(2048 * 0.2 / 2000)


def test_the_source_that_gains_most_is_taken() -> None:
    source = chosen(busy, prefiller, replica("h", role="decode"), held={"h": Held(8000)})
    assert isinstance(source, Source)
    assert source.replica.id == "h"


@pytest.mark.parametrize(
    "facts",
    [
        {"kv_layout": "other"},
        {"kv_layout": ""},
        {"kv_address": ""},
        {"is_tripped": True},
        {"role": "decode"},
        {"state": ReplicaState.OUT},
        {"state": ReplicaState.DRAINING},
        {"state": ReplicaState.DEGRADED},
        {"taken_at": -2.0},
        {"max_model_len": 4096},
        {"kv_capacity_tokens": 4096},
    ],
)
def test_a_replica_computes_prompts_for_others_only_if_it_can(facts: dict[str, Any]) -> None:
    assert chosen(busy, replica("p", **{"role": "prefill", **facts})) is Alone.NOBODY


def test_a_source_is_allowed_untried_and_has_the_adapter() -> None:
    assert chosen(busy, prefiller, allowed=frozenset({"d"})) is Alone.NOBODY
    assert chosen(busy, prefiller, avoid=frozenset({"p"})) is Alone.NOBODY
    assert chosen(busy, prefiller, adapter="lora") is Alone.NOBODY
    assert isinstance(chosen(busy, replace(prefiller, adapters=frozenset({"lora"})), adapter="lora"), Source)


def test_a_replica_that_drains_still_hands_over_what_it_holds() -> None:
    source = chosen(replica("d"), replica("h", state=ReplicaState.DRAINING), held={"h": Held(8000)})
    assert isinstance(source, Source)
    assert source.reason is SourceReason.PREFIX


def test_always_is_always_but_for_what_is_there_already_and_never_is_never() -> None:
    assert isinstance(chosen(replica("d"), prefiller, split="always"), Source)
    assert isinstance(chosen(replica("d"), prefiller, split="always", tokens=20), Source)
    assert chosen(replica("d"), prefiller, split="always", held={"d": Held(8000)}) is Alone.WARM
    assert chosen(replica("d"), split="always") is Alone.NOBODY
    assert chosen(busy, prefiller, split="never") is Alone.NEVER


speeds = st.floats(100, 100_000)
queues = st.integers(0, 20_000)
blocks = st.integers(0, 40)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[ReplicaSnapshot, list[ReplicaSnapshot], dict[str, Held]]:
    def one(name: str) -> ReplicaSnapshot:
        running = draw(st.integers(0, 200))
        return replica(
            name,
            role=draw(st.sampled_from(["both", "prefill", "decode"])),
            num_running=running,
            num_open=running,
            queued_tokens=draw(queues),
            prefill_tokens_per_s=draw(speeds),
            decode_tokens_per_s=draw(speeds),
            kv_pull_tokens_per_s=draw(speeds),
            chunk_tokens=draw(st.sampled_from([0, 512, 2048])),
        )

    names = ["d", "a", "b", "c"]
    held = {name: Held(256 * tokens, 256 * draw(st.integers(0, tokens))) for name in names if (tokens := draw(blocks))}
    return one("d"), [one(name) for name in names[1:]], held


@given(fleets(), st.integers(2, 10_240))
def test_no_source_costs_more_than_it_gains(fleet: Any, tokens: int) -> None:
    picked, peers, held = fleet
    held = {name: Held(min(one.tokens, tokens - 1), min(one.on_host, tokens - 1)) for name, one in held.items()}
    source = choose_source(request(tokens), picked, peers, held, LOAD, 0.0)
    if isinstance(source, Source):
        assert source.gain_s > 0
        assert source.replica.id != picked.id
        assert source.rest_tokens >= 1
        assert 1 <= source.pulled_tokens < tokens
        assert source.ttft_s >= picked.queue_s


@given(fleets(), st.integers(2, 255))
def test_short_prompts_stay(fleet: Any, tokens: int) -> None:
    picked, peers, _ = fleet
    assert choose_source(request(tokens), picked, peers, {}, LOAD, 0.0) is Alone.SHORT


@given(fleets(), st.integers(512, 10_240), st.integers(1, 256))
def test_warm_prefixes_stay(fleet: Any, tokens: int, missing: int) -> None:
    picked, peers, held = fleet
    held = {**held, picked.id: Held(tokens - missing)}
    for split in ("auto", "always"):
        assert choose_source(request(tokens), picked, peers, held, LOAD, 0.0, split) is Alone.WARM  # type: ignore[arg-type]


def test_a_stream_that_was_given_back_pulls_what_its_first_replica_has() -> None:
    draining = replica("o", state=ReplicaState.DRAINING)
    source = moved_source(replica("d"), draining, 3000, Held(1024), LOAD)
    assert source is not None
    assert (source.reason, source.pulled_tokens, source.rest_tokens, source.prefills) == (
        SourceReason.MOVED,
        1975,
        1,
        False,
    )
    for origin in (
        replica("o"),
        replica("o", state=ReplicaState.OUT),
        replica("o", state=ReplicaState.DRAINING, kv_layout="other"),
        replica("o", state=ReplicaState.DRAINING, kv_address=""),
    ):
        assert moved_source(replica("d"), origin, 3000, Held(), LOAD) is None


# -- the router


def test_a_prefill_replica_answers_only_if_nobody_else_is_left() -> None:
    router = Router()
    choice = router.pick(request(), [prefiller, replica("d", role="decode", num_open=400)], 0.0)
    assert choice.replica is not None
    assert choice.replica.id == "d"
    assert choice.dropped == {"p": "prefill_only"}
    choice = router.pick(request(), [prefiller, replica("d", role="decode", state=ReplicaState.OUT)], 0.0)
    assert choice.replica is not None
    assert choice.replica.id == "p"
    assert choice.dropped == {"d": "not_ready"}


def with_source(router: Router, asked: EdgeRequest, *replicas: ReplicaSnapshot, slo: Slo = SLO) -> Any:
    choice = router.pick(asked, replicas, 0.0)
    router.add_source(asked, choice, replicas, 0.0, slo)
    return choice


def test_answers_under_way_count_the_more_the_tighter_the_objective_of_their_tokens_is() -> None:
    waiting = replica("p", role="prefill", queued_tokens=8000)
    for slo, is_apart in ((Slo(), False), (Slo(tpot_s=0.01), True), (Slo(ttft_s=0.05, tpot_s=0.01), False)):
        choice = with_source(Router(), request(), busy, waiting, slo=slo)
        assert (choice.source is not None) == is_apart
    assert with_source(Router(), request(), busy, waiting, slo=Slo(tpot_s=None)).alone is Alone.NO_GAIN


def test_a_request_that_is_sent_away_from_its_prefix_for_load_takes_it_along() -> None:
    router, asked = Router(), request()
    router.index.reset("hot", asked.hashes)
    choice = with_source(router, asked, replica("hot", num_open=100, num_running=100), replica("cold"))
    assert choice.replica.id == "cold"
    assert (choice.source.replica.id, choice.source.reason) == ("hot", SourceReason.PREFIX)
    assert choice.source.pulled_tokens == 8191


def test_both_legs_of_a_split_count_as_holders_of_the_prompt() -> None:
    router, asked = Router(), request()
    router.index.reset("p", [])
    router.index.reset("d", [])
    choice = with_source(router, asked, busy, prefiller)
    assert choice.source.prefills
    router.routed(asked, choice, 0.0)
    assert router.index.held(asked.hashes, [busy, prefiller]) == {"d": 32, "p": 32}


def test_of_very_many_replicas_the_holders_and_the_idlest_are_looked_at() -> None:
    router, asked = Router(), request()
    many = [replica(f"r{i}", role="decode", num_open=i) for i in range(1, 300)]
    idle = replica("p", role="prefill", queued_tokens=10)
    others = [replica(f"p{i}", role="prefill", queued_tokens=1000 + i) for i in range(40)]
    choice = with_source(router, asked, busy, *many, *others, idle)
    assert choice.replica.id != "p"
    router.add_source(
        asked, choice := router.pick_among(asked, [busy], 0.0, {}), [busy, *many, *others, idle], 0.0, SLO
    )
    assert choice.source is not None
    assert choice.source.replica.id == "p"
    router.index.reset("r299", asked.hashes)
    router.add_source(
        asked, choice := router.pick_among(asked, [busy], 0.0, {}), [busy, *many, *others, idle], 0.0, SLO
    )
    assert choice.source is not None
    assert choice.source.replica.id == "r299"


def test_models_have_their_own_setting() -> None:
    router = Router(splits={"m": "never"})
    assert with_source(router, request(), busy, prefiller).alone is Alone.NEVER
    choice = router.pick(request(), [busy], 0.0)
    router.add_origin(request(), choice, replica("o", state=ReplicaState.DRAINING), 9000)
    assert choice.source is None


def test_of_replicas_without_a_kv_transfer_nothing_is_said() -> None:
    choice = with_source(Router(), request(), replace(busy, kv_address=""), prefiller)
    assert (choice.source, choice.alone) == (None, None)
    choice = with_source(Router(), request(can_pull=False), busy, prefiller)
    assert (choice.source, choice.alone) == (None, None)
    choice = with_source(Router(), request(holds_cache=False), busy, prefiller)
    assert (choice.source, choice.alone) == (None, None)
