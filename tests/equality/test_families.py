"""Greedy output of tiny models of every family is that of transformers, whatever the engine does on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import PreTrainedModel

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from tests.equality.inprocess import InProcess
from tests.equality.reference import assert_greedy, assert_logprobs, reference_logits
from tests.examples import examples
from tests.model.tiny import CONFIGS, StateDictCheckpoint, hf_model

TOKENS = torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [TOKENS[:1], TOKENS[10:33], TOKENS[40:57], TOKENS[60:64], TOKENS[70:111]]
SHARED = TOKENS[120:150]
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Pair:
    """The same weights as a model of theirs and as one of ours."""

    theirs: PreTrainedModel
    ours: CausalLM
    ops: Ops

    def engine(self, **options: int) -> InProcess:
        return InProcess(self.ours, self.ops, **options)

    def check(self, engine: InProcess, *requests: Request) -> None:
        for request in requests:
            output = engine.outputs[request.id]
            assert len(output) == request.max_tokens
            assert_greedy(reference_logits(self.theirs, request.prompt_ids, output), output)


def make_ops(name: str) -> Ops:
    if name == "reference":
        return ReferenceOps()
    try:
        return NativeOps("float32", threads=1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


OTHERS = re.compile(r"moe|llama4|next|qwen3\.5")
# Every family on the native kernels. The torch reference runs one of them: how requests are batched does not know the
# family, and `tests/model` holds the reference's numbers of each. The fast minute has those that came first.
FIRST = [name for name in CONFIGS if name.startswith(("llama", "mistral", "qwen")) and not OTHERS.search(name)]
PAIRS = [
    pytest.param(("reference", "llama"), id="reference-llama"),
    *(
        pytest.param(("native", name), marks=[] if name in FIRST else pytest.mark.slow, id=f"native-{name}")
        for name in CONFIGS
    ),
]


# Whose blocks are shared with whom is the same for every family: one on each kind of kernels, one of them windowed, and
# the one whose cache is of another form.
SHARED_PAIRS = [
    pytest.param(("reference", "llama"), id="reference-llama"),
    pytest.param(("native", "qwen2"), id="native-qwen2"),
    pytest.param(("native", "deepseek-v3"), id="native-deepseek-v3", marks=pytest.mark.slow),
]
SHARING = pytest.mark.parametrize("pair", SHARED_PAIRS, indirect=True)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    kernels, name = request.param
    theirs, ops = hf_model(name), make_ops(kernels)
    return Pair(theirs, load_model(StateDictCheckpoint(theirs), ops), ops)


def greedy(name: str, prompt: list[int], max_tokens: int = 12, *, namespace: str = "") -> Request:
    return Request(name, prompt, max_tokens, sampling=GREEDY, namespace=namespace)


def test_alone(pair: Pair) -> None:
    engine = pair.engine()
    request = greedy("a", PROMPTS[1], 24)
    engine.run(request)
    pair.check(engine, request)


def test_mixed_batch_of_requests_that_arrive_at_different_steps(pair: Pair) -> None:
    engine = pair.engine(chunk_tokens=16)
    requests = [greedy(f"r{i}", prompt, 6 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    engine.run(*requests, apart=2)
    pair.check(engine, *requests)


@pytest.mark.parametrize(("block_size", "chunks"), [(4, (1, 7)), (16, (3, 13))], ids=["4", "16"])
def test_chunked_prompts(pair: Pair, block_size: int, chunks: tuple[int, ...]) -> None:
    for chunk_tokens in chunks:
        engine = pair.engine(block_size=block_size, chunk_tokens=chunk_tokens, max_num_seqs=2)
        requests = [greedy("a", PROMPTS[1], 6), greedy("b", PROMPTS[2], 5)]
        engine.run(*requests)
        pair.check(engine, *requests)


@SHARING
def test_prompt_that_is_wholly_cached(pair: Pair) -> None:
    engine = pair.engine()
    first, again = greedy("first", SHARED[:24]), greedy("again", SHARED[:24])
    engine.run(first)
    engine.run(again)
    assert engine.cached["again"] == 23  # the last token is computed, in a copy of its block
    assert engine.num_copies == 1
    assert engine.outputs["again"] == engine.outputs["first"]
    pair.check(engine, first, again)


@SHARING
def test_prefix_taken_from_a_sequence_that_is_still_running(pair: Pair) -> None:
    engine = pair.engine()
    first = greedy("first", SHARED[:22], 20)
    branch, sibling = greedy("branch", SHARED[:18] + TOKENS[:9]), greedy("sibling", SHARED[:15] + TOKENS[9:15])
    engine.submit(first)
    for _ in range(6):
        engine.step()
    engine.run(branch, sibling)
    assert (engine.cached["branch"], engine.cached["sibling"]) == (18, 15)
    assert engine.num_copies == 2
    pair.check(engine, first, branch, sibling)


@SHARING
def test_second_turn_finds_the_answer_to_the_first(pair: Pair) -> None:
    engine = pair.engine()
    first = greedy("first", SHARED, 11)
    engine.run(first)
    second = greedy("second", [*SHARED, *engine.outputs["first"], *TOKENS[:6]])
    engine.run(second)
    assert engine.cached["second"] == len(SHARED) + 10  # the answer's last token was never computed
    pair.check(engine, first, second)


def test_preempted_sequences(pair: Pair) -> None:
    engine = pair.engine(num_blocks=14, chunk_tokens=7)
    requests = [greedy("a", PROMPTS[1], 20), greedy("b", PROMPTS[2], 20), greedy("c", PROMPTS[3], 30)]
    engine.run(*requests)
    assert engine.preemptions > 0
    pair.check(engine, *requests)


@SHARING
def test_siblings_share_their_prompt(pair: Pair) -> None:
    engine = pair.engine(chunk_tokens=16)
    requests = [greedy(f"choice {i}", SHARED) for i in range(4)]
    engine.run(*requests)
    assert [engine.cached[r.id] for r in requests] == [0, 28, 28, 28]
    pair.check(engine, *requests)


@SHARING
def test_namespaces_share_nothing_and_say_the_same(pair: Pair) -> None:
    engine = pair.engine()
    requests = [greedy(name, SHARED, namespace=name) for name in ("", "acme", "bell")]
    engine.run(*requests, apart=3)
    assert set(engine.cached.values()) == {0}
    pair.check(engine, *requests)


@SHARING
def test_without_a_prefix_cache(pair: Pair) -> None:
    engine = pair.engine(share_prefixes=False, num_blocks=16)
    requests = [greedy(f"r{i}", SHARED[:24]) for i in range(3)]
    engine.run(*requests, apart=2)
    assert set(engine.cached.values()) == {0}
    assert engine.cache.pool.num_cached == 0
    assert engine.preemptions > 0
    pair.check(engine, *requests)


def test_logprobs(pair: Pair) -> None:
    engine = pair.engine(chunk_tokens=9)
    params = SamplingParams(temperature=0.7, seed=3, num_logprobs=4)
    requests = [Request(f"r{i}", prompt, 8, sampling=params) for i, prompt in enumerate(PROMPTS)]
    engine.run(*requests)
    for request in requests:
        output = engine.outputs[request.id]
        logits = reference_logits(pair.theirs, request.prompt_ids, output)
        assert_logprobs(logits, output, engine.logprobs[request.id])


workloads = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps to wait before it arrives
        st.integers(0, 20),  # tokens of a prefix that all have in common
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.integers(1, 10),  # max_tokens
        st.sampled_from(["", "other"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module", params=["reference", "native"])
def windowed(request: pytest.FixtureRequest) -> Pair:
    theirs, ops = hf_model("qwen2"), make_ops(request.param)
    return Pair(theirs, load_model(StateDictCheckpoint(theirs), ops), ops)


@settings(max_examples=examples(15))
@given(
    workload=workloads, chunk_tokens=st.integers(1, 20), block_size=st.sampled_from([2, 4, 16]), spare=st.integers(0, 6)
)
def test_any_workload(
    windowed: Pair,
    workload: list[tuple[int, int, list[int], int, str]],
    chunk_tokens: int,
    block_size: int,
    spare: int,
) -> None:
    num_blocks = -(-40 // block_size) + spare  # room for one, and hardly for another
    engine = windowed.engine(block_size=block_size, num_blocks=num_blocks, chunk_tokens=chunk_tokens, max_num_seqs=4)
    requests = []
    for i, (wait, shared, own, max_tokens, namespace) in enumerate(workload):
        for _ in range(wait):
            engine.step()
        requests.append(greedy(f"r{i}", SHARED[:shared] + own, max_tokens, namespace=namespace))
        engine.submit(requests[-1])
    engine.run()
    windowed.check(engine, *requests)
