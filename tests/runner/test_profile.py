from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.model.loading import random_model
from penstock.model.ops import KVShape
from penstock.model.ops.reference import ReferenceOps
from penstock.runner.limits import Limits
from penstock.runner.profile import decode_step, largest_step, told_if_too_large
from penstock.runner.runner import ModelRunner
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import ADMISSION_SCAN
from tests.runner.small import CONFIG


@given(
    max_num_seqs=st.integers(1, 300),
    chunk_tokens=st.integers(1, 1000),
    max_model_len=st.integers(1, 1000),
    block_size=st.integers(1, 64),
)
def test_no_step_is_larger(max_num_seqs: int, chunk_tokens: int, max_model_len: int, block_size: int) -> None:
    plan = largest_step(Limits(block_size, max_num_seqs, chunk_tokens, max_model_len))
    lengths = [planned.num_tokens for planned in plan.slices]
    assert len(lengths) == max_num_seqs
    assert all(planned.sample is not None for planned in plan.slices)
    assert max(planned.start + planned.num_tokens for planned in plan.slices) <= max_model_len
    assert lengths == sorted(lengths)  # decodes first, as a scheduler plans them
    prompts = -(-chunk_tokens // min(chunk_tokens, max_model_len))  # so many fill the step
    if prompts <= max_num_seqs:
        assert plan.num_tokens == chunk_tokens + max_num_seqs - prompts
    assert len(plan.copies) == min(max_num_seqs, ADMISSION_SCAN)


SMALL = Limits(16, 5, 40, 30)


@pytest.mark.parametrize("plan", [largest_step(SMALL), decode_step(1, SMALL), decode_step(3, SMALL)])
def test_it_runs_on_a_cache_of_one_block(plan: StepPlan) -> None:
    ops = ReferenceOps()
    shape = KVShape(CONFIG.num_layers, 1, 16, CONFIG.num_kv_heads, CONFIG.head_dim)
    runner = ModelRunner(random_model(CONFIG, ops), ops, ops.allocate_kv(shape))
    sampled = runner.submit(plan).result().sampled
    for one in sampled:
        assert one is not None
        assert one.logprobs is not None
        assert len(one.logprobs[0].top) == 20


def test_a_device_that_is_too_small_is_told_in_one_line() -> None:
    message = "the model does not fit into the device's memory; use a smaller one"
    with pytest.raises(ConfigError, match=message), told_if_too_large("the model", "use a smaller one"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
