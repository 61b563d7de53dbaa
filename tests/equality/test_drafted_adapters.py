"""Drafts for several adapters in one engine, with and without a second tier of the cache: the same, bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.sched.sequence import Sequence
from tests.equality.inprocess import InProcess
from tests.equality.test_lora_together import CONFIG, NUM_SLOTS, Adapted, adapted, requests

__all__ = ["adapted"]  # the fixture


@pytest.mark.parametrize("options", [{}, {"num_blocks": 17, "host_blocks": 32}], ids=["roomy", "with a host tier"])
def test_each_gets_what_it_would_get_alone(adapted: Adapted, options: dict[str, int]) -> None:
    source = random.Random(3)
    asked = requests(adapted, 10)
    answers = {request.id: adapted.alone(request).outputs[request.id] for request in asked}

    def guess(sequence: Sequence) -> list[int]:
        rest = answers[sequence.request.id][sequence.num_generated :][:5]
        return [t if source.random() < 0.8 else source.randrange(CONFIG.vocab_size) for t in rest]

    engine = InProcess(
        adapted.model, adapted.ops, adapters=adapted.adapters, num_slots=NUM_SLOTS, guess=guess, **options
    )  # type: ignore[arg-type]
    engine.run(*asked, apart=1)
    counters = engine.scheduler.counters
    assert counters.drafted_tokens > counters.accepted_tokens > 20
    assert (counters.preemptions > 0) == ("num_blocks" in options)
    for request in asked:
        assert engine.outputs[request.id] == answers[request.id]
        expected = torch.stack(adapted.alone(request).logits[request.id])
        assert torch.equal(torch.stack(engine.logits[request.id]), expected)
