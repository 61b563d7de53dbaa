from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.step_log import StepShape
from penstock.sim.cost import StepCost
from penstock.sim.profile import load_profile, read_profile, shipped_profiles
from penstock.sim.quantiles import Quantiles

H200 = load_profile("h200-llama8b")


def test_the_shipped_ones_can_be_read() -> None:
    assert "h200-llama8b" in shipped_profiles()
    assert all(load_profile(name).name == name for name in shipped_profiles())


@pytest.mark.parametrize(
    ("shape", "measured_s"),
    [
        (StepShape(0, 0, 1, 256), 1.280 / 256),  # W1: one stream
        (StepShape(0, 0, 8, 8 * 256), 1.327 / 256),  # W1b
        (StepShape(0, 0, 256, 256 * 640), (6.568 - 131_072 / 41_271) / 255),  # W2, less its prompts
        (StepShape(8192, 2 * 4096 * 4097 // 2), 8192 / 41_271),  # W6
    ],
)
def test_the_h200_does_what_was_measured_of_it(shape: StepShape, measured_s: float) -> None:
    assert H200.cost.seconds(shape) == pytest.approx(measured_s, rel=0.03)


def test_the_h200_is_that_of_the_benchmarks() -> None:
    assert H200.cost.prefill_tokens_per_s(4096, 8192) == pytest.approx(41_000, rel=0.02)
    assert H200.kv_tokens == 600_000


def test_steps_that_decode_take_the_same_one_by_one() -> None:
    cost = StepCost(1e-3, 2e-3, 30e-6, 1e-9, 1e-7, 5e-6)
    one_by_one = [cost.seconds(StepShape(0, 0, 7, 5000 + 7 * i)) for i in range(100)]
    assert cost.decode_seconds(7, 5000, 100) == one_by_one


def test_a_profile_that_is_wrong_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'h200-llama8b'"):
        load_profile("h200-lama8b")
    with pytest.raises(ConfigError, match=r"did you mean 'cost\.token_s'"):
        read_profile("name: x\nkv_tokens: 1\ncost: {tokens_s: 1}", where="x")
    with pytest.raises(ConfigError, match="must divide"):
        read_profile("name: x\nkv_tokens: 1\nblock_tokens: 100\ncost: {step_s: 0, weights_s: 0, token_s: 0}", where="x")
    with pytest.raises(ConfigError, match="not YAML"):
        read_profile("{", where="x")


def test_quantiles_are_right_within_a_per_cent() -> None:
    quantiles = Quantiles()
    for i in range(1, 10_001):
        quantiles.add(i / 1000)
    assert quantiles.at(0.5) == pytest.approx(5.0, rel=0.01)
    assert quantiles.at(0.99) == pytest.approx(9.9, rel=0.01)
    assert quantiles.mean == pytest.approx(5.0, rel=0.001)
    assert quantiles.curve()[-1][1] == 1.0
    assert Quantiles().at(0.5) is None
