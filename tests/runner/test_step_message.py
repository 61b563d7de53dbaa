"""A step as a message: what a runner needs of a plan holds no object of the scheduler and travels as bytes."""

from __future__ import annotations

import copy
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.runner.assemble import Assembly
from penstock.runner.step_inputs import (
    MaskBits,
    StepInputs,
    decode_choices,
    encode_choices,
    host_batch,
    pack,
)
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled, through_bytes
from tests.runner.reference_batch import reference_batch
from tests.runner.test_cuda_runner import CONFIG, TOKENS, workload

CPU = torch.device("cpu")
SPEC = SampleSpec(SamplingParams(), history=(), prompt_len=1, position=1)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Decodes, with and without drafts, and then chunks of prompts, in any blocks and any slots."""
    ids = st.integers(0, 2**31 - 1)
    slices = []
    for number in range(draw(st.integers(1, 6))):
        is_prompt = number and draw(st.booleans())
        tokens = draw(st.lists(ids, min_size=2, max_size=9) if is_prompt else st.lists(ids, min_size=1, max_size=4))
        ahead = [] if is_prompt else [SPEC] * (len(tokens) - 1)
        sample = SPEC if ahead or draw(st.booleans()) else None
        blocks = draw(st.lists(ids, min_size=1, max_size=5))
        slot = draw(st.none() | st.integers(0, 3))
        start = draw(st.integers(0, 2**20))
        slices.append(Slice(f"r{number}", start, len(tokens), tokens, blocks, sample, 0, ahead=ahead, slot=slot))
    slices.sort(key=lambda s: s.num_tokens > 1)
    return StepPlan(slices, draw(st.lists(st.tuples(ids, ids), max_size=3)), [(1, "digest")])


@given(plans())
def test_packed_inputs_are_the_plans_batch_before_and_after_they_travel(plan: StepPlan) -> None:
    packed = pack(plan)
    arrived = StepInputs.decode(packed.encode())
    assert replace(arrived, ints=packed.ints) == replace(packed, copies=list(plan.copies))
    assert np.array_equal(arrived.ints, packed.ints)
    expected = reference_batch(plan.slices, CPU)
    found = host_batch(arrived, CPU)
    for name in ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "logit_rows"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    assert found.num_decodes == expected.num_decodes
    assert [(one.slot, one.rows.tolist()) for one in found.adapters] == [
        (one.slot, one.rows.tolist()) for one in expected.adapters
    ]


def test_packed_inputs_do_not_change_with_the_plan() -> None:
    """The lists of a plan belong to the scheduler, which goes on with them."""
    blocks = [4, 5]
    plan = StepPlan([Slice("a", 8, 1, [7], blocks, SPEC, 0)])
    packed = pack(plan)
    before = copy.deepcopy(packed.ints)
    blocks += [6, 7]
    assert np.array_equal(packed.ints, before)


def test_choices_are_the_same_after_they_travel() -> None:
    specs = [
        SampleSpec(SamplingParams(temperature=0.7, seed=2**63, logit_bias={3: -1.5}), [1, 2, 3], 2, 3, [9], None),
        SampleSpec(SamplingParams(), [], 1, 1, [], MaskBits(bytes([3, 255]))),
    ]
    arrived = decode_choices(encode_choices(specs))
    assert [msgspec.structs.astuple(one) for one in arrived] == [msgspec.structs.astuple(one) for one in specs]


def answers(assembly: Assembly, requests: list[Request]) -> dict[str, list[int]]:
    clients = Clients(one_after_the_other(requests, apart=2))
    serve(assembly, clients, num_blocks=TOKENS // assembly.limits.block_size)
    return {name: answer.token_ids for name, answer in clients.finished.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_are_the_same_when_every_plan_goes_through_bytes(device: str, greedy: bool) -> None:
    """`cpu-overlapped` in the other tests of runners does so with guides, drafts, adapters and blocks of the host."""
    assembly = assembled(CONFIG, device, block_size=16)
    requests = workload(3, greedy=greedy)
    expected = answers(assembly, requests)
    runner = copy.copy(assembly.runner)
    assert answers(replace(assembly, runner=through_bytes(runner)), requests) == expected
