from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.images import ImageInput, image_tokens
from penstock.core.request import Request
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.images import ImageSlots
from penstock.sched.plan import Sampled, StepPlan, StepResult
from penstock.sched.scheduler import Scheduler


def image(number: int, start: int = 0, num_tokens: int = 4) -> ImageInput:
    return ImageInput(f"{number:08x}", start, num_tokens, [1, 1, num_tokens], [0], b"")


def taken(slots: ImageSlots) -> tuple[list[str], list[str]]:
    encodes, drops = slots.take()
    return [each.digest for each in encodes], drops


def test_an_image_is_encoded_once_and_found_afterwards() -> None:
    slots, a = ImageSlots(16, 8), image(1)
    for expected in (["00000001"], []):
        slots.begin()
        assert slots.reach([a], 0, 10) == 10
        assert taken(slots) == (expected, [])
    assert (slots.num_kept, slots.encoded_tokens) == (4, 4)


def test_what_a_slice_does_not_cover_is_not_encoded() -> None:
    slots = ImageSlots(16, 16)
    slots.begin()
    assert slots.reach([image(1, 0), image(2, 6), image(3, 20)], 4, 4) == 4
    assert taken(slots)[0] == ["00000002"]


def test_a_slice_ends_where_an_image_begins_that_the_step_has_no_room_for() -> None:
    slots = ImageSlots(16, 6)
    slots.begin()
    assert slots.reach([image(1, 2), image(2, 9)], 0, 20) == 9
    assert not slots.has_room([image(2, 9)], 9)
    assert slots.reach([image(2, 9)], 9, 5) == 0
    assert slots.reach([image(1, 3)], 0, 20) == 20, "it is there already"
    slots.take()
    slots.begin()
    assert slots.reach([image(2, 9)], 9, 5) == 5


def test_one_image_that_is_larger_than_a_step_is_encoded_by_itself() -> None:
    slots = ImageSlots(16, 6)
    slots.begin()
    assert slots.reach([image(1, 0, 12)], 0, 12) == 12
    assert slots.reach([image(2, 0, 1)], 0, 12) == 0


def test_the_embeddings_that_were_used_longest_ago_make_room() -> None:
    slots = ImageSlots(12, 12)
    for number in (1, 2, 3, 1, 4):
        slots.begin()
        slots.reach([image(number)], 0, 4)
        _, drops = taken(slots)
    assert drops == ["00000002"]
    assert slots.num_kept == 12


def test_embeddings_that_a_step_needs_do_not_make_room_in_it() -> None:
    slots = ImageSlots(8, 8)
    slots.begin()
    assert [slots.reach([image(number)], 0, 4) for number in (1, 2, 3)] == [4, 4, 0]
    assert slots.num_kept == 8


def test_beside_decodes_an_image_waits_until_the_steps_had_room_for_it() -> None:
    slots = ImageSlots(64, 64, price=2.0)
    waited = 0
    while True:
        slots.begin(room=10)  # five tokens of images
        if slots.has_room([image(1, 0, 20)], 0):
            break
        waited += 1
    assert waited == 3
    assert slots.reach([image(1, 0, 20)], 0, 20) == 20
    slots.take()
    slots.begin(room=10)
    assert not slots.has_room([image(2, 0, 20)], 0), "its room is spent"
    slots.begin(None)
    assert slots.has_room([image(2, 0, 20)], 0), "nobody decodes"


def test_room_that_nobody_wanted_is_not_saved() -> None:
    slots = ImageSlots(64, 64)
    for _ in range(10):
        slots.begin(room=4)
    assert not slots.has_room([image(1, 0, 8)], 0)


def test_a_plan_that_came_to_nothing_leaves_its_images_to_the_next() -> None:
    slots = ImageSlots(8, 8)
    slots.begin()
    slots.reach([image(1)], 0, 4)
    slots.begin()
    assert slots.reach([image(2)], 0, 4) == 4
    assert slots.reach([image(3)], 0, 4) == 0
    assert taken(slots)[0] == ["00000001", "00000002"]


def test_after_a_step_that_failed_its_images_are_encoded_again() -> None:
    slots = ImageSlots(8, 8)
    slots.begin()
    slots.reach([image(1)], 0, 4)
    encodes, _ = slots.take()
    slots.undo(encodes)
    assert slots.num_kept == 0
    slots.begin()
    slots.reach([image(1)], 0, 4)
    assert taken(slots) == (["00000001"], ["00000001"])


def test_after_parking_nothing_is_there() -> None:
    slots = ImageSlots(8, 8)
    slots.begin()
    slots.reach([image(1)], 0, 4)
    slots.take()
    slots.clear()
    slots.begin()
    assert slots.reach([image(1)], 0, 4) == 4
    assert taken(slots) == (["00000001"], ["00000001"])


class Table:
    """What a device keeps: as much as it has room for, and nothing that was not encoded."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: dict[str, int] = {}

    def run(self, plan: StepPlan) -> None:
        for digest in plan.drops:
            self._kept.pop(digest, None)
        for each in plan.encodes:
            assert each.digest not in self._kept
            self._kept[each.digest] = each.num_tokens
        assert sum(self._kept.values()) <= self._max_tokens
        for planned in plan.slices:
            for each in planned.images:
                if each.start < planned.start + planned.num_tokens and each.start + each.num_tokens > planned.start:
                    assert each.digest in self._kept, "an image is not there"


@given(
    prompts=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 4)), max_size=3), min_size=1, max_size=6
    ),
    room=st.integers(9, 24),
    step=st.integers(1, 9),
    chunk=st.integers(1, 24),
    price=st.sampled_from([0.5, 1.0, 7.0]),
    spare=st.integers(0, 8),
)
def test_any_prompts_come_to_their_end_and_what_they_compute_is_there(
    prompts: list[list[tuple[int, int, int]]], room: int, step: int, chunk: int, price: float, spare: int
) -> None:
    """Each prompt: images of so many tokens, by number, behind so many tokens of text."""
    cache = KVCache(16 + spare, 4)
    slots, table = ImageSlots(room, step, price=price), Table(room)
    budget = StepBudget(chunk, target_s=None, floor=min(4, chunk))
    scheduler = Scheduler(cache, budget, max_num_seqs=4, images=slots)
    for place, parts in enumerate(prompts):
        ids, images = [place], []
        for text, num_tokens, number in parts:
            ids += [1] * text
            images.append(image(100 * num_tokens + number, len(ids), num_tokens))
            ids += image_tokens(images[-1].digest, num_tokens)
        scheduler.submit(Request(f"r{place}", [*ids, 2], 6, images=tuple(images)), 0.0)
    for turn in range(1000):
        plan = scheduler.plan(float(turn))
        if plan is None:
            break
        table.run(plan)
        assert all(planned.num_tokens > 0 for planned in plan.slices)
        scheduler.commit(
            plan, StepResult([None if s.sample is None else Sampled([3]) for s in plan.slices]), turn + 0.5
        )
    assert not scheduler.has_work
    assert cache.pool.num_free == 16 + spare
