from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.runner.memory import free_bytes, num_blocks
from tests.runner.small import CONFIG

CPU = torch.device("cpu")


def blocks(*, context_length: int = 100, head_dim: int = 8, fraction: float | None = None, width: int = 4) -> int:
    config = replace(CONFIG, context_length=context_length, head_dim=head_dim)
    return num_blocks(config, 16, bytes_per_value=width, device=CPU, fraction=fraction)


def test_free_memory_is_some_and_not_more_than_a_machine_has() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50


def test_a_cpu_gets_room_for_a_whole_context_and_never_for_less_than_many_requests() -> None:
    assert blocks(context_length=100) == 1024  # 16,384 tokens in blocks of 16
    assert blocks(context_length=20_001) == 1251


def test_no_context_is_so_long_that_its_cache_takes_more_than_half_of_memory() -> None:
    block_bytes = 16 * CONFIG.kv_bytes_per_token(4)
    assert 0 < blocks(context_length=10**12) * block_bytes < 0.6 * free_bytes(CPU)


def test_a_fraction_is_of_free_memory_whatever_the_context() -> None:
    block_bytes = 16 * CONFIG.kv_bytes_per_token(4)
    assert blocks(fraction=0.25) * block_bytes == pytest.approx(0.25 * free_bytes(CPU), rel=0.1)


def test_narrower_values_make_more_blocks() -> None:
    assert blocks(fraction=0.25, width=2) == pytest.approx(2 * blocks(fraction=0.25, width=4), rel=0.1)


def test_a_model_with_no_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no memory left"):
        blocks(head_dim=2**44)
