"""Memory that is parked and woken at the same addresses, over a fake driver, and models that are moved there."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.sampling import SamplingParams
from penstock.model.loading import random_model
from penstock.model.ops import KVShape, LayerKV
from penstock.model.ops.reference import ReferenceOps
from penstock.runner.rehome import rehome, tensors_of
from penstock.runner.runner import ModelRunner
from penstock.runner.virtual_memory import Keep, VirtualMemory
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from tests.runner.small import CONFIG

CPU = torch.device("cpu")
UNMAPPED, FRESH = 0xEE, 0xCD  # what is read where nothing is mapped, and in new memory


class FakeDriver:
    """Host memory in the part of a device's: what is unmapped is lost, what is new holds anything, and there is so much
    of it."""

    granularity = 4096

    def __init__(self, total_bytes: int = 64 << 20) -> None:
        self.left_bytes = total_bytes
        self.handles: dict[int, int] = {}  # and their sizes
        self.mapped: dict[int, int] = {}  # handles by address
        self.ranges: dict[int, Tensor] = {}
        self._next = 1

    def reserve(self, num_bytes: int) -> int:
        made = torch.full((num_bytes,), UNMAPPED, dtype=torch.uint8)
        self.ranges[made.data_ptr()] = made
        return made.data_ptr()

    def create(self, num_bytes: int) -> int:
        assert num_bytes % self.granularity == 0
        if num_bytes > self.left_bytes:
            raise EngineUnavailable("there is no room")
        self.left_bytes -= num_bytes
        self._next += 1
        self.handles[self._next] = num_bytes
        return self._next

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        assert address not in self.mapped
        assert handle not in self.mapped.values()
        assert self.handles[handle] == num_bytes == self.ranges[address].nbytes
        self.mapped[address] = handle
        self.ranges[address].fill_(FRESH)

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.ranges[address].nbytes == num_bytes
        del self.mapped[address]
        self.ranges[address].fill_(UNMAPPED)

    def release(self, handle: int) -> None:
        assert handle not in self.mapped.values(), "it is still mapped"
        self.left_bytes += self.handles.pop(handle)

    def export(self, handle: int) -> int:
        assert handle in self.handles
        return handle

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        return self.ranges[address]

    def free_bytes(self) -> int:
        return self.left_bytes

    def wait(self) -> None:
        pass


def pin(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def test_content_outlives_a_park_as_it_was_asked_for() -> None:
    driver = FakeDriver()
    memory = VirtualMemory(driver, pin)
    weights, slots = memory.allocate(10_000, Keep.ONCE), memory.allocate(5000, Keep.ALWAYS)
    kv = memory.zeros((3, 7, 11), dtype=torch.bfloat16, device=CPU)
    assert kv.shape == (3, 7, 11)
    assert kv.count_nonzero() == 0
    addresses = [one.data_ptr() for one in (weights, slots, kv)]
    whole = memory.num_bytes
    assert (whole, driver.left_bytes) == (3 * 4096 + 2 * 4096 + 4096, (64 << 20) - whole)
    weights.copy_(torch.arange(10_000) % 251)
    for number in range(3):
        slots.fill_(number)
        kv.fill_(1.0)
        parked = memory.park()
        assert parked.num_bytes == whole
        assert list(parked.seconds) == ["pin", "copy", "release"][number > 0 :]
        assert (driver.handles, driver.mapped, driver.left_bytes) == ({}, {}, 64 << 20)
        assert set(weights.tolist()) == {UNMAPPED}
        assert memory.wake().num_bytes == whole
        assert torch.equal(weights, (torch.arange(10_000) % 251).byte())
        assert set(slots.tolist()) == {number}
        assert kv.count_nonzero() == 0
        assert [one.data_ptr() for one in (weights, slots, kv)] == addresses
        assert memory.export(kv) in driver.handles


def test_weights_that_have_changed_are_copied_anew() -> None:
    memory = VirtualMemory(FakeDriver(), pin)
    weights = memory.allocate(100, Keep.ONCE).fill_(1)
    for number in (1, 2, 3):
        weights.fill_(number)
        memory.change()
        memory.park()
        memory.wake()
        assert set(weights.tolist()) == {number}
    memory.park()
    memory.wake()
    assert set(weights.tolist()) == {3}


def test_a_wake_without_room_changes_nothing_and_can_be_tried_again() -> None:
    driver = FakeDriver()
    memory = VirtualMemory(driver, pin)
    weights = memory.allocate(9000, Keep.ONCE).fill_(7)
    memory.zeros((4096,), dtype=torch.uint8, device=CPU)
    memory.park()
    taken, driver.left_bytes = driver.left_bytes - 12_288, 12_288  # enough for the weights alone
    with pytest.raises(EngineUnavailable):
        memory.wake()
    assert (driver.handles, driver.mapped, driver.left_bytes) == ({}, {}, 12_288)
    driver.left_bytes += taken
    memory.wake()
    assert set(weights.tolist()) == {7}


def test_a_park_without_host_memory_changes_nothing() -> None:
    def refuse(num_bytes: int) -> Tensor:
        raise ConfigError("none")

    driver = FakeDriver()
    memory = VirtualMemory(driver, refuse)
    weights = memory.allocate(100, Keep.ONCE).fill_(3)
    with pytest.raises(ConfigError):
        memory.park()
    assert len(driver.mapped) == 1
    assert set(weights.tolist()) == {3}


# -- tensors that are moved there


class Holder:
    __slots__ = ("inner", "unset")

    def __init__(self, inner: object) -> None:
        self.inner = inner


def test_tensors_are_found_wherever_they_are_held() -> None:
    made = [torch.full((2,), float(number)) for number in range(7)]

    def closes_over() -> Tensor:
        return made[0]

    empty = types.FunctionType(closes_over.__code__, {}, closure=(types.CellType(),))

    class Plain:
        def __init__(self) -> None:
            self.one = made[1]
            self.again = self

        def method(self) -> None: ...

    held = {
        "closure": (closes_over, empty),
        "object": [Plain().method],
        "partial": functools.partial(max, made[2], key={made[3]}),
        "slots": Holder((made[4], frozenset([made[5]]), {1: made[6]})),
        "plain": [1, "x", None, torch, Tensor, torch.float32],
    }
    assert {id(one) for one in tensors_of(held)} == {id(one) for one in made}


def test_memory_that_other_ranks_have_mapped_is_not_moved() -> None:
    class Collective:
        stays_in_place = True

        def __init__(self) -> None:
            self.buffer = torch.zeros(3)

    assert list(tensors_of({"ranks": [Collective()]})) == []


def views_of(driver: FakeDriver, tensors: Sequence[Tensor]) -> list[bool]:
    return [one.untyped_storage().data_ptr() in driver.ranges for one in tensors]


@pytest.mark.parametrize("inference", [False, True])
def test_views_stay_views_and_everything_reads_as_before(inference: bool) -> None:
    driver = FakeDriver()
    memory = VirtualMemory(driver, pin)
    with torch.inference_mode(inference):
        base = torch.randn(6, 10)
        parts = [base, base[2:4], base.T, base[:, 3].view(torch.int32), torch.randn(3).bfloat16(), torch.empty(0)]
    before = [one.clone() for one in parts]
    moved = rehome(memory, parts, Keep.ONCE, CPU)
    assert moved == 512 + 512
    assert views_of(driver, parts) == [True] * 5 + [False]
    assert rehome(memory, parts, Keep.NEVER, CPU) == 0, "what was moved stays"
    with torch.inference_mode(inference):
        assert all(torch.equal(one, was) for one, was in zip(parts, before, strict=True))
        assert [one.stride() for one in parts] == [one.stride() for one in before[:2]] + [
            (1, 10),
            (10,),
            (1,),
            (1,),
        ]
        base[3, 3] = 5.0
        assert parts[1][1, 3] == parts[2][3, 3] == parts[3].view(torch.float32)[3] == 5.0


def prompt(number: int) -> Slice:
    sample = SampleSpec(SamplingParams(temperature=0.0), history=(), prompt_len=14, position=14)
    blocks = [4 * number + place for place in range(4)]
    return Slice(f"r{number}", 0, 14, [number * 7 + place for place in range(14)], blocks, sample, epoch=0)


def test_a_model_that_was_moved_answers_the_same_to_the_bit_after_a_park() -> None:
    driver = FakeDriver()
    memory = VirtualMemory(driver, pin)
    ops = ReferenceOps(CPU, torch.float32)
    shape = KVShape(CONFIG.num_layers, 16, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
    model = random_model(CONFIG, ops)
    plans = [StepPlan([prompt(number)]) for number in range(4)]

    def answers(kv: list[LayerKV]) -> list[Tensor]:
        runner = ModelRunner(model, ops, kv)
        return [runner.forward(runner.prepare(plan)).clone() for plan in plans]

    before = answers(ops.allocate_kv(shape))
    tensors = [one for one in tensors_of(model) if one.numel()]
    assert rehome(memory, tensors_of(model), Keep.ONCE, CPU) > 0
    assert all(views_of(driver, tensors))
    kv = ops.allocate_kv(shape, memory.zeros)
    assert all(torch.equal(one, was) for one, was in zip(answers(kv), before, strict=True))
    for _ in range(2):
        memory.park()
        memory.wake()
        assert all(torch.equal(one, was) for one, was in zip(answers(kv), before, strict=True))
