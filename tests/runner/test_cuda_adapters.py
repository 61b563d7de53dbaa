"""Requests for several adapters and for the base model in the engine's own loop, on each device's runner: every token
is one that the reference might have chosen with that adapter merged into its weights. There are fewer places on the
device than adapters, so what lies in a place changes while steps that read it are on their way.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock.core.model_config import ModelConfig
from penstock.core.request import AdapterRef, Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.peft import read_peft
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly, assemble
from penstock.sched.plan import Runner, StepHandle, StepPlan
from tests.devices import NEEDS_GPU
from tests.model.lora import ATTENTION, EVERY_LINEAR, merged, write_adapter
from tests.model.tiny import ArrayCheckpoint
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=512,
)
SLOTS = 2
ADAPTERS = [(3, EVERY_LINEAR), (8, ATTENTION), (64, EVERY_LINEAR), (17, ("k_proj", "up_proj", "down_proj"))]


@cache
def tensors() -> dict[str, object]:
    random_weights = RandomCheckpoint(CONFIG)
    return {name: random_weights.tensor(name) for name in random_weights.tensor_names()}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(directory / str(seed), CONFIG, seed=seed, rank=rank, targets=targets)
        for seed, (rank, targets) in enumerate(ADAPTERS)
    ]


@pytest.fixture(scope="module")
def judges(adapters: list[Path]) -> dict[str, Judge]:
    """By the adapter's digest; "": of the base model."""
    weights = {"": tensors()}
    for path in adapters:
        found = read_peft(path)
        weights[found.digest] = merged(tensors(), found)  # type: ignore[arg-type, assignment]
    return {
        digest: Judge(ArrayCheckpoint(CONFIG, each), longest=CONFIG.context_length)  # type: ignore[arg-type]
        for digest, each in weights.items()
    }


@pytest.fixture(
    params=[
        "cpu-overlapped",  # steps one by one are held to the bit in tests/equality
        pytest.param("cuda", marks=NEEDS_GPU),
        pytest.param("cuda without graphs", marks=NEEDS_GPU),
        pytest.param("cuda with many rows", marks=NEEDS_GPU),
    ]
)
def assembly(request: pytest.FixtureRequest, adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> Assembly:
    made = assembled(CONFIG, request.param.split()[0], block_size=16, max_loras=SLOTS)
    if request.param == "cuda with many rows":
        made = assembled(CONFIG, "cuda", block_size=16, max_loras=len(ADAPTERS), max_num_seqs=48)
    assert made.adapters is not None
    for path in adapters:
        made.adapters.keep(made.adapters.read(str(path), read_peft(path).digest))
    if request.param == "cuda without graphs":
        monkeypatch.setattr(made.runner, "_graphs", {})
    return made


def requests(adapters: list[Path], count: int) -> list[Request]:
    """Prompts that begin alike; some are decoding while others come."""
    source = random.Random(count)
    shared = source.choices(range(500), k=40)
    refs = [None, *(AdapterRef(read_peft(path).digest, path.name) for path in adapters)]
    return [
        Request(
            f"r{i}",
            shared[: source.choice([0, 20, 40])] + source.choices(range(500), k=source.randint(1, 120)),
            source.randint(4, 30),
            SamplingParams(temperature=0.0),
            adapter=refs[i % len(refs)],
        )
        for i in range(count)
    ]


class Watched:
    """A runner, and what it was asked to put where while a step was on its way."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.overlaps = runner.overlaps
        self.placements: list[tuple[int, str]] = []
        self.num_adapted = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        self.placements += plan.placements
        self.num_adapted += any(each.slot is not None for each in plan.slices)
        return self._runner.submit(plan)


def test_every_token_is_that_of_the_adapters_own_model(
    assembly: Assembly, adapters: list[Path], judges: dict[str, Judge]
) -> None:
    watched = Watched(assembly.runner)
    is_wide = assembly.limits.max_num_seqs > 16
    asked = requests(adapters, 48 if is_wide else 10)
    clients = Clients(one_after_the_other(asked, apart=0 if is_wide else 2))
    serve(replace(assembly, runner=watched), clients, num_blocks=600)
    assert len(clients.finished) == len(asked)
    for answer in clients.finished.values():
        adapter = answer.request.adapter
        judges[adapter.digest if adapter is not None else ""].check(answer)
    assert len(watched.placements) > SLOTS, "they never took turns"
    assert watched.num_adapted > 10


@pytest.mark.parametrize("assembly", ["cpu-overlapped"], indirect=True)
def test_the_judge_knows_adapters_apart(adapters: list[Path], judges: dict[str, Judge], assembly: Assembly) -> None:
    asked = requests(adapters, 5)
    clients = Clients(one_after_the_other(asked, apart=0))
    serve(assembly, clients, num_blocks=200)
    for answer in clients.finished.values():
        adapter = answer.request.adapter
        for digest, judge in judges.items():
            if digest != (adapter.digest if adapter is not None else ""):
                with pytest.raises(AssertionError):
                    judge.check(answer)


@NEEDS_GPU
def test_a_step_without_adapters_runs_the_graphs_that_know_none(adapters: list[Path]) -> None:
    made = assembled(CONFIG, "cuda", block_size=16, max_loras=SLOTS)
    kinds = {sizes.adapted for sizes in made.runner._graphs._graphs}  # type: ignore[attr-defined]
    assert kinds == {True, False}
    plain = assembled(CONFIG, "cuda", block_size=16)
    assert plain.adapters is None
    assert {sizes.adapted for sizes in plain.runner._graphs._graphs} == {False}  # type: ignore[attr-defined]


def kv_bytes(settings: EngineSettings) -> int:
    """The size of an engine's KV cache. What earlier engines left in torch's cache of freed memory is given back to
    the device first: an engine counts it as taken."""
    gc.collect()
    torch.cuda.empty_cache()
    return assemble(RandomCheckpoint(CONFIG), settings, lambda *_: None).size.kv_bytes


@NEEDS_GPU
def test_what_adapters_take_is_set_aside_before_the_cache_is_made() -> None:
    settings = EngineSettings(memory_fraction=0.05, max_loras=64, max_lora_rank=256, max_num_seqs=2, chunk_tokens=96)
    plain, adapting = kv_bytes(replace(settings, max_loras=0)), kv_bytes(settings)
    hidden, ffn, kv = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_kv_heads * CONFIG.head_dim
    numbers = CONFIG.num_layers * (2 * (512 + hidden) + 2 * (hidden + kv) + 3 * (hidden + ffn))  # of every rank
    taken = 64 * 256 * numbers * 2
    assert taken <= plain - adapting <= taken + (256 << 20)
