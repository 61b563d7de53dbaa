from __future__ import annotations

import pytest

from penstock.capacity.rank_share import rank_config
from penstock.capacity.shapes import SHAPES, shape, shape_from_numbers
from penstock.capacity.splitting import split_obstacle
from penstock.core.errors import ConfigError
from penstock.core.parallelism import Parallelism


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama1b", 1.24),
        ("llama3b", 3.21),
        ("llama8b", 8.03),
        ("llama70b", 70.6),
        ("llama405b", 406),
        ("mistral24b", 23.6),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
    ],
)
def test_a_shape_has_as_many_parameters_as_its_model(name: str, billions: float) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("deepseek-v2-lite", 15.7, 2.66),  # both tables counted: without the embedding 2.4
        ("deepseek-v3", 671, 37.55),
        ("kimi-k2", 1026, 32.86),
    ],
)
def test_a_mixture_has_many_parameters_and_few_of_them_active(name: str, billions: float, active: float) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert SHAPES[name].num_active_parameters / 1e9 == pytest.approx(active, rel=0.005)


def test_a_token_of_deepseek_v3_is_one_latent_and_one_key_in_each_layer() -> None:
    config = SHAPES["deepseek-v3"]
    assert config.kv_bytes_per_token(2) == 70_272 == 61 * (512 + 64) * 2
    ranks = rank_config(config, Parallelism(tp=8))
    assert (ranks.num_heads, ranks.kv_bytes_per_token(2)) == (16, 70_272)  # every rank keeps all of it
    assert split_obstacle(config, Parallelism(tp=8, sp=2), None) is not None


def test_a_shape_can_be_given_in_numbers() -> None:
    numbers = "hidden=8192,ffn=28672,layers=80,heads=64,kv_heads=8"
    assert shape_from_numbers(numbers) == SHAPES["llama70b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden=8192", "ffn, layers, heads"),
        ("hiden=8192", "did you mean 'hidden'"),
        ("hidden=0,ffn=1,layers=1,heads=1", "hidden=0"),
        ("hidden=x,ffn=1,layers=1,heads=1", "hidden=x"),
        ("hidden=64,ffn=64,layers=1,heads=8,kv_heads=3", "cannot share"),
    ],
)
def test_numbers_that_make_no_shape_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_from_numbers(text)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama8b'"):
        shape("llama8")
