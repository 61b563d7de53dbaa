from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from penstock.core.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.engine.step_log import StepLimits, StepLog, StepShape
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from penstock.sim.calibrate import calibrate, read_steps
from penstock.sim.cost import StepCost
from penstock.sim.profile import read_profile, write_profile

TRUE = StepCost(step_s=2e-3, weights_s=9e-3, token_s=0.6e-3, pair_s=1e-7, context_s=3e-6, sequence_s=0.0)
LIMITS = StepLimits(16_384, 16, 8, 512, 8192, False)


def steps(count: int, seed: int, noise: float = 0.0, hiccups: float = 0.0) -> list[tuple[StepShape, float]]:
    random, found = Random(seed), []
    for _ in range(count):
        tokens = random.choice([0, 0, random.randrange(2, 512)])
        decodes = random.randrange(0 if tokens else 1, 8)
        pairs, context = tokens * random.randrange(1, 800), decodes * random.randrange(10, 800)
        shape = StepShape(tokens, pairs, decodes, context, decodes * random.choice([0, 0, 3]))
        seconds = TRUE.seconds(shape) * (1 + random.uniform(-noise, noise))
        found.append((shape, seconds * (random.uniform(2, 10) if random.random() < hiccups else 1)))
    return found


def test_it_finds_the_coefficients_that_made_the_steps() -> None:
    fit = calibrate(steps(400, seed=1))
    for shape, seconds in steps(100, seed=2):
        assert fit.cost.seconds(shape) == pytest.approx(seconds, rel=0.03)


def test_noise_and_hiccups_hardly_move_it() -> None:
    fit = calibrate(steps(800, seed=3, noise=0.05, hiccups=0.05))
    assert fit.num_left_out >= 20
    true = sum(seconds for _, seconds in steps(400, seed=4))
    assert sum(fit.cost.seconds(shape) for shape, _ in steps(400, seed=4)) == pytest.approx(true, rel=0.05)


def test_a_log_that_an_engine_wrote_becomes_a_profile(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.csv", LIMITS)
    for shape, seconds in steps(100, seed=5):
        slices = [Slice("p", 100, shape.prefill_tokens, [], [], None, 0)] if shape.prefill_tokens else []
        slices += [Slice(f"d{i}", 99, 1, [0], [], None, 0) for i in range(shape.decodes)]
        log.add(StepPlan(slices), seconds)
    log.close()
    read, limits = read_steps(tmp_path / "steps.csv")
    assert len(read) == 100
    assert limits == LIMITS
    assert all(shape.decode_context == 100 * shape.decodes for shape, _ in read)
    profile = calibrate(read).profile("mine", limits)
    assert read_profile(write_profile(profile), where="here") == profile
    assert profile.block_tokens == 16


def test_drafts_have_a_column_of_their_own(tmp_path: Path) -> None:
    """They are no prompt, and their sequence decodes."""
    spec = SampleSpec(SamplingParams(), [], 0, 0)
    log = StepLog(tmp_path / "steps.csv", LIMITS)
    log.add(
        StepPlan([Slice("a", 99, 4, [0] * 4, [], spec, 0, ahead=[spec] * 3), Slice("b", 49, 1, [0], [], spec, 0)]), 0.1
    )
    log.add(StepPlan([Slice("c", 0, 22, [0] * 22, [], spec, 0, ahead=[spec] * 2)]), 0.2)
    log.close()
    ((first, _), (second, _)), _ = read_steps(tmp_path / "steps.csv")
    assert first == StepShape(decodes=2, decode_context=150, drafts=3)
    assert second == StepShape(20, 210, drafts=2)
    cost = replace(TRUE, weights_s=0.0)
    assert cost.seconds(first) == pytest.approx(cost.seconds(first._replace(drafts=0)) + 3 * cost.token_s)


def test_what_is_no_step_log_is_said_clearly(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(ConfigError, match="no step log"):
        read_steps(path)
    with pytest.raises(ConfigError, match="too short"):
        calibrate(steps(10, seed=0))
