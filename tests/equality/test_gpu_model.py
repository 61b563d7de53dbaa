"""A small real model on a GPU: in float32 it answers what the CPU engine answers, and FP8 costs it little.

The CPU engine is held to the same rule, which is proven by it where there is no GPU: by a few of the requests, since
`test_default_model` holds the CPU engine to transformers. PENSTOCK_TEST_MODEL names another copy of the model, for
machines that cannot download the default one.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal, NamedTuple

import pytest
import torch
from tools.perplexity import open_model, prose, table

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.hub.checkpoint import Checkpoint
from penstock.runner.assemble import assemble
from penstock.text.tokenizer import Tokenizer
from tests.devices import NEEDS_GPU
from tests.runner.clients import Answer, Clients, one_after_the_other, serve
from tests.runner.judge import Judge, acceptable, sample_specs

pytestmark = pytest.mark.slow

GPU = pytest.param("cuda", marks=NEEDS_GPU)
MAX_TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, num_logprobs=3)
QUESTIONS = [
    "What is a river?",
    "Name three colors.",
    "Why is the sky blue?",
    "Count from one to ten.",
    "Who was Bach?",
]


class Work(NamedTuple):
    lengths: list[int]  # of prompts that are prose
    questions: list[str]
    num_blocks: int  # too few for all of them at once
    threads: int  # one where other tests have the other cores


WHOLE = Work([1, 2, 7, 16, 17, 40, 64, 65, 130, 256, 600], QUESTIONS, 56, len(os.sched_getaffinity(0)))
WORK = WHOLE if torch.cuda.is_available() else Work([1, 16, 65], QUESTIONS[:2], num_blocks=20, threads=1)
NUM_SHARED = 150  # tokens of prose that other prompts all begin with
FP8_COST = 0.05  # at most, of the perplexity
# The same of integers, as on a CPU. The file is in 4 bits already: `int4` is how it is stored.
INTEGER_COSTS = {"stored": 0.02, "int8": 0.03, "w8a8": 0.04, "int4": 0.02}


@cache
def checkpoint() -> Checkpoint:
    return open_model(os.environ.get("PENSTOCK_TEST_MODEL", "smollm2"))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint().tokenizer_source)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(checkpoint(), longest=1024)


@cache
def requests() -> list[Request]:
    text = prose(tokenizer())
    prompts = [text[20 * n : 21 * n] for n in WORK.lengths]
    for question in WORK.questions:
        chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer().encode(chat, add_special_tokens=False))
        prompts.append([*text[:NUM_SHARED], *prompts[-1]])
    return [Request(f"r{i}", prompt, MAX_TOKENS, GREEDY) for i, prompt in enumerate(prompts)]


@cache
def answers(device: Literal["cpu", "cuda"]) -> dict[str, Answer]:
    """Of all requests, arriving one after the other, chunked, sharing what they can, short of blocks."""
    settings = EngineSettings(
        device=device,
        dtype="float32",
        block_size=16,
        max_num_seqs=12,
        chunk_tokens=80,
        max_model_len=1024,
        threads=WORK.threads,
        memory_fraction=0.05 if device == "cuda" else None,
    )
    assembly = assemble(checkpoint(), settings, lambda *_: None)
    torch.set_num_threads(WORK.threads)  # for the judge: the CPU engine's kernels had them till now
    clients = Clients(one_after_the_other(requests(), apart=2))
    serve(assembly, clients, num_blocks=WORK.num_blocks)
    assert clients.measured.totals.preemptions > 0
    assert clients.measured.cache.cached_tokens >= (len(WORK.questions) - 1) * (NUM_SHARED - 16)
    return clients.finished


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_every_greedy_token_is_the_references(device: Literal["cpu", "cuda"], judge: Judge) -> None:
    found = answers(device)
    assert all(len(answer.token_ids) == MAX_TOKENS for answer in found.values())
    undecided = sum(judge.check(answer) for answer in found.values())
    print(f"{device}: {undecided} of {MAX_TOKENS * len(found)} tokens were undecided")
    assert undecided <= 0.02 * MAX_TOKENS * len(found)


@NEEDS_GPU
def test_answers_are_the_cpu_engines_up_to_a_token_that_the_reference_is_undecided_about(judge: Judge) -> None:
    expected, found = answers("cpu"), answers("cuda")
    for name, answer in found.items():
        pairs = zip(answer.token_ids, expected[name].token_ids, strict=True)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is None:
            continue
        logits = judge.logits(answer.request.prompt_ids, answer.token_ids)
        choices = acceptable(logits, sample_specs(answer))[first]
        print(f"{name} differs at token {first}: the reference accepts {choices.nonzero().flatten().tolist()}")
        assert choices[answer.token_ids[first]]
        assert choices[expected[name].token_ids[first]]


@NEEDS_GPU
def test_fp8_costs_little() -> None:
    formats = ["bfloat16", "float32", "fp8", "fp8-kv", "fp8+fp8-kv"]
    found = table(checkpoint(), formats, prose(tokenizer()), "cuda", windows=16, length=512)
    plain = found["bfloat16"]
    assert plain.decode == pytest.approx(found["float32"].decode, rel=0.02)
    for name in ("fp8", "fp8-kv", "fp8+fp8-kv"):
        assert found[name].prefill <= (1 + FP8_COST) * plain.prefill
        assert found[name].decode <= (1 + FP8_COST) * plain.decode
        assert found[name] != plain, "nothing was quantized"


@NEEDS_GPU
def test_integers_cost_little() -> None:
    found = table(checkpoint(), ["bfloat16", *INTEGER_COSTS], prose(tokenizer()), "cuda", windows=16, length=512)
    plain = found["bfloat16"]
    for name, cost in INTEGER_COSTS.items():
        assert found[name].prefill <= (1 + cost) * plain.prefill, name
        assert found[name].decode <= (1 + cost) * plain.decode, name
        assert found[name] != plain, "nothing was quantized"
