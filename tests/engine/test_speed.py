import pytest

from penstock.engine.messages import StepFigures
from penstock.engine.speed import StepSpeed


def test_nothing_is_known_before_a_step() -> None:
    speed = StepSpeed()
    speed.observe(StepFigures())
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == (None, None)


def test_prompts_and_decodes_are_told_apart() -> None:
    speed = StepSpeed()
    for _ in range(3):
        speed.observe(StepFigures(num_tokens=108, num_sequences=8, cost_s=0.05))
        speed.observe(StepFigures(num_tokens=8, num_sequences=8, cost_s=0.01))
    assert speed.prefill_tokens_per_s == pytest.approx(2000)
    assert speed.decode_step_s == pytest.approx(0.01)


def test_what_is_recent_counts_most() -> None:
    speed = StepSpeed()
    for cost_s in [0.01] * 100 + [0.04] * 100:
        speed.observe(StepFigures(num_tokens=8, num_sequences=8, cost_s=cost_s))
        speed.observe(StepFigures(num_tokens=108, num_sequences=8, cost_s=cost_s))
    assert speed.decode_step_s == pytest.approx(0.04, rel=0.05)
    assert speed.prefill_tokens_per_s == pytest.approx(2500, rel=0.05)


def test_steps_with_drafts_are_neither_prompts_nor_plain_decodes() -> None:
    speed = StepSpeed()
    speed.observe(StepFigures(num_tokens=8, num_sequences=8, cost_s=0.01))
    speed.observe(StepFigures(num_tokens=30, num_drafts=22, num_sequences=8, cost_s=0.02))
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == (None, pytest.approx(0.01))
