"""Long random traffic on the engine's own loop and a real runner: no wrong token, nothing left behind.

On a GPU for SOAK_SECONDS (20); a few hundred turns on a CPU, where it proves mostly itself. SOAK_SEED chooses other
traffic.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from penstock.core.model_config import ModelConfig
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge
from tests.runner.traffic import Limits, Traffic

MIN_TURNS = 500  # so that everything happens even on a machine that is slow


@dataclass(frozen=True)
class Soak:
    device: str
    config: ModelConfig
    limits: Limits
    block_size: int
    num_blocks: int  # too few, by far, for all that is open
    max_num_seqs: int
    chunk_tokens: int
    seconds: float
    host_kv_gib: float | None = None

    def assembled(self) -> Assembly:
        return assembled(
            self.config,
            self.device,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            chunk_tokens=self.chunk_tokens,
            host_kv_gib=self.host_kv_gib,
        )

    def is_over(self) -> Callable[[int], bool]:
        end_s = time.monotonic() + self.seconds
        return lambda turns: turns >= MIN_TURNS and time.monotonic() >= end_s


def on_cpu(device: str, block_size: int) -> Soak:
    config = ModelConfig(
        architecture="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_length=256,
    )
    limits = Limits(128, max_model_len=256, prefix_len=120, tail_len=20, max_tokens=30, most_open=24)
    return Soak(device, config, limits, block_size, 640 // block_size, 8, chunk_tokens=48, seconds=0.0)


def on_gpu(block_size: int) -> Soak:
    config = ModelConfig(
        architecture="llama",
        vocab_size=500,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        context_length=1024,
    )
    limits = Limits(500, max_model_len=1024, prefix_len=700, tail_len=60, max_tokens=120, most_open=120)
    seconds = float(os.environ.get("SOAK_SECONDS", "20")) / 3  # there are three
    return Soak(
        "cuda", config, limits, block_size, 8192 // block_size, max_num_seqs=48, chunk_tokens=512, seconds=seconds
    )


@pytest.mark.parametrize(
    "soak",
    [
        pytest.param(on_cpu("cpu", 16), id="cpu", marks=pytest.mark.slow),
        pytest.param(on_cpu("cpu tp=2", 16), id="cpu-tp-2", marks=pytest.mark.slow),
        pytest.param(on_cpu("cpu pp=2", 16), id="cpu-pp-2", marks=pytest.mark.slow),
        pytest.param(on_cpu("cpu tp=2 pp=2", 16), id="cpu-tp-2-pp-2", marks=pytest.mark.slow),
        pytest.param(replace(on_cpu("cpu tp=2 sp=2", 8), num_blocks=40), id="cpu-tp-2-sp-2", marks=pytest.mark.slow),
        pytest.param(on_gpu(16), id="cuda-16", marks=NEEDS_GPU),
        pytest.param(on_gpu(64), id="cuda-64", marks=NEEDS_GPU),
        pytest.param(
            replace(on_cpu("cpu-overlapped", 4), host_kv_gib=0.002), id="cpu-overlapped-host", marks=pytest.mark.slow
        ),
        pytest.param(replace(on_cpu("cpu tp=2", 4), host_kv_gib=0.002), id="cpu-tp-2-host", marks=pytest.mark.slow),
        pytest.param(replace(on_cpu("cpu pp=2", 4), host_kv_gib=0.002), id="cpu-pp-2-host", marks=pytest.mark.slow),
        pytest.param(
            replace(on_cpu("cpu tp=2 sp=2", 2), num_blocks=160, host_kv_gib=0.002),
            id="cpu-tp-2-sp-2-host",
            marks=pytest.mark.slow,
        ),
        pytest.param(replace(on_gpu(16), host_kv_gib=0.02), id="cuda-16-host", marks=NEEDS_GPU),
    ],
)
def test_no_token_is_wrong_and_nothing_is_left_behind(soak: Soak) -> None:
    soaked(soak)


def soaked(soak: Soak) -> None:
    assembly = soak.assembled()
    clients = Clients(Traffic(soak.limits, soak.is_over(), seed=int(os.environ.get("SOAK_SEED", "0"))))
    serve(assembly, clients, num_blocks=soak.num_blocks)

    judge = Judge(RandomCheckpoint(soak.config), longest=soak.config.context_length, device=assembly.device.name)
    undecided = judge.check_all(clients)
    copied = sum(answer.cached_tokens % soak.block_size > 0 for answer in clients.finished.values())
    load, totals, cache = clients.measured.load, clients.measured.totals, clients.measured.cache
    print(
        f"{soak.device}, blocks of {soak.block_size}: {load.steps} steps, {len(clients.finished)} finished, "
        f"{clients.num_aborted} aborted, {totals.generated_tokens} tokens ({undecided} undecided), "
        f"{totals.preemptions} preemptions, {cache.cached_tokens} of {cache.prompt_tokens} prompt tokens cached, "
        f"{copied} copies, {cache.loaded_tokens} tokens from the host"
    )
    assert min(len(clients.finished), clients.num_aborted, totals.preemptions, cache.evictions, copied) > 0
    assert cache.cached_tokens > 0.2 * cache.prompt_tokens
    assert (cache.loaded_tokens > 0) == (soak.host_kv_gib is not None)
