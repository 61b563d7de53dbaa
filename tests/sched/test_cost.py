"""The shares of a step are the step, and each pays for what it adds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.sched.cost import Split, Work, split
from penstock.sched.plan import SampleSpec, Slice

WORK = Work(token=100.0, choice=20.0, read=0.5, pair=0.01)
SPEC = SampleSpec(SamplingParams(), [], 1, 1)

works = st.builds(
    Work, token=st.floats(1, 1e9), choice=st.floats(0, 1e9), read=st.floats(0, 1e7), pair=st.floats(0, 1e6)
)
kinds = st.sampled_from(["decode", "ended", "chunk", "last chunk", "ended chunk", "one token of a prompt"])
parts = st.lists(st.tuples(kinds, st.integers(0, 100_000), st.integers(2, 8192)), min_size=1, max_size=40)


def part(name: str, start: int, num_tokens: int, *, samples: bool = True) -> Slice:
    blocks = list(range(-(-(start + num_tokens) // 16)))
    return Slice(name, start, num_tokens, [0] * num_tokens, blocks, SPEC if samples else None, 0)


def step_of(kinds: list[tuple[str, int, int]]) -> tuple[list[Slice], list[TokenEvent]]:
    slices, events = [], []
    for index, (kind, start, length) in enumerate(kinds):
        name = f"{index}"
        is_chunk = kind.endswith("chunk")
        slices.append(
            part(name, start, length if is_chunk else 1, samples=kind not in ("chunk", "one token of a prompt"))
        )
        if kind in ("decode", "last chunk"):
            events.append(TokenEvent(name, [7]))
    return slices, events


def bill(shares: Split, slices: list[Slice], events: list[TokenEvent], work: Work) -> dict[str, float]:
    """Everybody's seconds, as whoever gets the tokens tells them."""
    seconds = {share.request_id: share.seconds for share in shares.shares}
    starts = {one.request_id: one.start for one in slices}
    for event in events:
        seconds.setdefault(event.request_id, shares.price * work.decode(starts[event.request_id] + 1))
    return seconds


@given(parts, works, st.floats(1e-6, 10.0))
def test_the_shares_of_a_step_are_all_of_it_and_everybody_in_it_has_one(
    kinds: list[tuple[str, int, int]], work: Work, seconds: float
) -> None:
    slices, events = step_of(kinds)
    shares = split(slices, events, seconds, work)
    paid = bill(shares, slices, events, work)
    assert paid.keys() == {one.request_id for one in slices}
    assert sum(paid.values()) == pytest.approx(seconds, rel=1e-9)
    assert all(share > 0 for share in paid.values())
    assert shares.num_tokens == sum(one.num_tokens for one in slices)
    assert shares.num_decodes == sum(one.num_tokens == 1 for one in slices)
    assert shares.context == sum(one.start + one.num_tokens for one in slices)


@given(parts, works)
def test_shares_are_in_the_ratio_of_the_work(kinds: list[tuple[str, int, int]], work: Work) -> None:
    slices, events = step_of(kinds)
    shares = split(slices, events, 1.0, work)
    for one in slices:
        paid = bill(shares, slices, events, work)[one.request_id]
        assert paid == pytest.approx(shares.price * work.slice(one), rel=1e-9)


def test_a_decode_is_a_slice_of_one_token() -> None:
    for context in (1, 17, 4096):
        assert WORK.decode(context) == pytest.approx(WORK.slice(part("a", context - 1, 1)))
    contexts = (3, 50, 700)
    assert WORK.decodes(3, sum(contexts)) == pytest.approx(sum(map(WORK.decode, contexts)))


def test_a_prompt_in_the_cache_pays_less_than_one_that_is_computed() -> None:
    slices = [part("computed", 0, 1000), part("cached", 990, 10)]
    events = [TokenEvent("computed", [1]), TokenEvent("cached", [1])]
    paid = bill(split(slices, events, 1.0, WORK), slices, events, WORK)
    assert paid["cached"] < 0.05 * paid["computed"]


def test_a_longer_context_pays_for_what_it_reads() -> None:
    slices = [part("short", 99, 1), part("long", 9_999, 1)]
    events = [TokenEvent("short", [1]), TokenEvent("long", [1])]
    paid = bill(split(slices, events, 1.0, WORK), slices, events, WORK)
    assert paid["long"] > 10 * paid["short"]


def test_one_that_ended_while_the_step_ran_pays_for_it_all_the_same() -> None:
    slices = [part("stays", 99, 1), part("left", 99, 1)]
    shares = split(slices, [TokenEvent("stays", [1])], 1.0, WORK)
    assert [(share.request_id, share.seconds, share.num_blocks) for share in shares.shares] == [("left", 0.5, 7)]
    assert shares.price * WORK.decode(100) == pytest.approx(0.5)
