"""The memory plan: never above the device, floors kept, loans that keep nobody out and come back."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.fleet.residency.memory_plan import ModelNeeds, allot, beside, kv_bytes_at_start, refusal

GIB = 1 << 30


def needs(name: str, fixed: float, floor: float = 1.0, most: float = 100.0, share: float = 1.0) -> ModelNeeds:
    """In GiB."""
    return ModelNeeds(name, int(fixed * GIB), int(floor * GIB), int(max(floor, most) * GIB), share)


@st.composite
def models(draw: st.DrawFn, at_least: int = 1) -> list[ModelNeeds]:
    count = draw(st.integers(at_least, 5))
    amount = st.integers(0, 20)
    return [
        needs(
            f"m{index}",
            draw(amount),
            draw(st.integers(1, 5)),
            draw(st.integers(1, 40)),
            draw(st.sampled_from([0.5, 1.0, 3.0])),
        )
        for index in range(count)
    ]


@given(models(), st.integers(1, 80))
def test_models_together_stay_within_the_device_with_their_floors(together: list[ModelNeeds], device: int) -> None:
    planned = allot(device * GIB, together)
    if planned is None:
        assert sum(model.least_bytes for model in together) > device * GIB
        return
    assert sum(one.total_bytes for one in planned.values()) <= device * GIB
    for model in together:
        one = planned[model.name]
        assert one.fixed_bytes == model.fixed_bytes
        assert model.floor_bytes <= one.kv_bytes <= model.most_bytes


@given(models(), st.integers(1, 80))
def test_nothing_is_left_that_somebody_could_use(together: list[ModelNeeds], device: int) -> None:
    planned = allot(device * GIB, together)
    assume(planned is not None)
    assert planned is not None
    left_bytes = device * GIB - sum(one.total_bytes for one in planned.values())
    wants_more = any(planned[model.name].kv_bytes < model.most_bytes for model in together)
    assert left_bytes < len(together) or not wants_more


@given(models(at_least=2), st.integers(1, 80))
def test_a_model_more_takes_only_of_what_was_lent(together: list[ModelNeeds], device: int) -> None:
    """And what it took comes back when it goes: the plan is one of those that are there."""
    before, after = allot(device * GIB, together[1:]), allot(device * GIB, together)
    assume(after is not None)
    assert before is not None
    assert after is not None
    for model in together[1:]:
        assert after[model.name].lent_bytes <= before[model.name].lent_bytes + len(together)


@given(models(at_least=2), st.integers(1, 80), st.integers(0, 2))
def test_a_loan_keeps_no_model_out(found: list[ModelNeeds], device: int, num_pinned: int) -> None:
    starting, pinned, others = found[0], found[1 : 1 + num_pinned], found[1 + num_pinned :]
    first = [starting, *pinned]
    assume(sum(model.least_bytes for model in first) <= device * GIB)
    kv_bytes = kv_bytes_at_start(device * GIB, 0, starting, pinned, others)
    assert starting.floor_bytes <= kv_bytes <= starting.most_bytes
    total_bytes = starting.fixed_bytes + kv_bytes + sum(model.least_bytes for model in pinned)
    assert total_bytes <= device * GIB
    for other in others:
        if sum(model.least_bytes for model in (*first, other)) <= device * GIB:
            assert total_bytes + other.least_bytes <= device * GIB


@given(models(at_least=2), st.integers(1, 80), st.integers(0, 60))
def test_a_start_stays_within_what_is_free(found: list[ModelNeeds], device: int, taken: int) -> None:
    starting, others = found[0], found[1:]
    assume(taken * GIB + starting.least_bytes <= device * GIB)
    kv_bytes = kv_bytes_at_start(device * GIB, taken * GIB, starting, [], others)
    assert starting.floor_bytes <= kv_bytes
    assert taken * GIB + starting.fixed_bytes + kv_bytes <= device * GIB


def test_shares_say_who_is_lent_how_much() -> None:
    planned = allot(20 * GIB, [needs("a", 3, share=3), needs("b", 3)])
    assert planned is not None
    assert (planned["a"].lent_bytes, planned["b"].lent_bytes) == (9 * GIB, 3 * GIB)


def test_a_model_alone_leaves_the_floors_of_those_that_fit_beside_it() -> None:
    a, b, c = needs("a", 3), needs("b", 3), needs("c", 30)
    assert [model.name for model in beside(10 * GIB, [a], [c, b])] == ["a", "b"]
    assert kv_bytes_at_start(10 * GIB, 0, a, [], [b, c]) == 2 * GIB  # its floor, and half of what the floors leave
    assert kv_bytes_at_start(10 * GIB, 0, a, [], [c]) == 7 * GIB  # nothing fits beside it


def test_a_model_that_does_not_fit_is_refused_in_figures() -> None:
    model = needs("big", 10, 2)
    assert refusal(12 * GIB, model, {}) == ""
    assert refusal(8 * GIB, model, {}) == (
        "big needs 12.00 GiB: 10.00 GiB for its weights, steps and process, and 2.00 GiB for its smallest KV cache; "
        "the device has 8.00 GiB for models: 4.00 GiB too little"
    )
    assert refusal(16 * GIB, model, {"chat": 6 * GIB}) == (
        "big needs 12.00 GiB: 10.00 GiB for its weights, steps and process, and 2.00 GiB for its smallest KV cache; "
        "the device has 16.00 GiB for models, of which 6.00 GiB are taken (6.00 GiB by chat) and 10.00 GiB are left: "
        "2.00 GiB too little"
    )
