"""Each device's runner in the engine's own loop: whatever is asked, and however it is served, every token is one that
the float32 reference on the CPU might have chosen. On a GPU steps overlap and decodes are graphs.

The CPU's runner is held to the same rule, so the two differ only where the reference is undecided; see judge.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
from _pytest.mark import ParameterSet

from penstock.core.model_config import ModelConfig
from penstock.core.request import FinishReason, Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import Assembly
from penstock.sched.plan import Runner, StepHandle, StepPlan, StepResult
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.judge import Judge

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=500,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=512,
    windows=(None, 40, None),
)
TOKENS = 9600  # of the cache, where there is room for all
SHORT = 640  # where there is not
GREEDY = SamplingParams(temperature=0.0)
GREEDY_SCORED = SamplingParams(temperature=0.0, num_logprobs=2)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(RandomCheckpoint(CONFIG), longest=CONFIG.context_length)


CPU = pytest.param(("cpu", 16), id="cpu-16")
OVERLAPPED = pytest.param(("cpu-overlapped", 64), id="cpu-overlapped-64", marks=pytest.mark.slow)
GPUS = [
    pytest.param(("cuda", 16), id="cuda-16", marks=NEEDS_GPU),
    pytest.param(("cuda", 64), id="cuda-64", marks=NEEDS_GPU),
]


@pytest.fixture(scope="module", params=[CPU, OVERLAPPED, *GPUS])
def assembly(request: pytest.FixtureRequest) -> Assembly:
    device, block_size = request.param
    made = assembled(CONFIG, device, block_size=block_size)
    assert made.runner.overlaps == (device != "cpu")
    assert (made.formats.kernels == "triton") == (device == "cuda")
    return made


def any_sampling(source: random.Random, seed: int) -> SamplingParams:
    def perhaps(*values: float) -> float:
        """The first value, which says "off", half of the time."""
        return values[0] if source.random() < 0.5 else source.choice(values[1:])

    return SamplingParams(
        temperature=source.choice([0.0, 0.7, 1.0, 1.3]),
        top_p=perhaps(1.0, 0.8, 0.95),
        top_k=source.choice([None, None, 1, 20]),
        min_p=perhaps(0.0, 0.05),
        presence_penalty=perhaps(0.0, 1.5),
        frequency_penalty=perhaps(0.0, 0.4, -0.3),
        repetition_penalty=perhaps(1.0, 1.2, 0.9),
        logit_bias={source.randrange(500): source.uniform(-4, 4) for _ in range(source.choice([0, 0, 3]))},
        seed=seed,
        num_logprobs=source.choice([None, 0, 2, 5]),
    )


def workload(seed: int, *, greedy: bool, short_prompts: bool = False) -> list[Request]:
    """Some prompts begin alike: in the middle of a block, at its end, or for more than one. Short ones have long
    answers: such requests are let in together and then outgrow the cache."""
    source = random.Random(seed)
    shared = source.choices(range(500), k=150)
    heads = [shared[:length] for length in (0, 0, 16, 40, 64, 150)]
    requests = []
    for i in range(16):
        if short_prompts:
            head, tail_len, max_tokens = shared[: source.choice([0, 16, 20])], source.randint(1, 20), 90 + i
        else:
            head, tail_len, max_tokens = source.choice(heads), source.randint(1, 150), source.randint(1, 60)
        request = Request(
            id=f"r{i}",
            prompt_ids=head + source.choices(range(500), k=tail_len),
            max_tokens=max_tokens,
            sampling=GREEDY_SCORED if greedy else any_sampling(source, seed=100 * seed + i),
            stop_token_ids=source.sample(range(500), k=0 if greedy else 3),
            min_tokens=source.choice([0, 3, 12]),
        )
        requests.append(request)
    return requests


def answered(assembly: Assembly, requests: list[Request], *, num_tokens: int = TOKENS, apart: int = 0) -> Clients:
    clients = Clients(one_after_the_other(requests, apart=apart))
    serve(assembly, clients, num_blocks=num_tokens // assembly.limits.block_size)
    assert len(clients.finished) == len(requests)
    return clients


def case(device: ParameterSet, greedy: bool, num_tokens: int) -> ParameterSet:
    name = f"{device.id}-{'greedy' if greedy else 'sampled'}-{'roomy' if num_tokens == TOKENS else 'short of blocks'}"
    return pytest.param(device.values[0], greedy, num_tokens, id=name, marks=device.marks)


# Each GPU all four ways. The CPU's two runners have two each, so that each way is tried on one of them.
@pytest.mark.parametrize(
    ("assembly", "greedy", "num_tokens"),
    [
        case(CPU, True, TOKENS),
        case(CPU, False, SHORT),
        case(OVERLAPPED, True, SHORT),
        case(OVERLAPPED, False, TOKENS),
        *(case(gpu, greedy, room) for gpu in GPUS for greedy in (True, False) for room in (TOKENS, SHORT)),
    ],
    indirect=["assembly"],
)
def test_every_token_is_the_references(assembly: Assembly, judge: Judge, greedy: bool, num_tokens: int) -> None:
    is_short = num_tokens == SHORT
    requests = workload(1, greedy=greedy, short_prompts=is_short)
    clients = answered(assembly, requests, num_tokens=num_tokens, apart=2 * is_short)
    undecided = judge.check_all(clients)
    assert (clients.measured.totals.preemptions > 0) == is_short
    assert clients.measured.cache.cached_tokens > 0
    if greedy:
        assert undecided <= 0.02 * clients.measured.totals.generated_tokens, "the rule forgives too much"
    else:
        assert {answer.finish for answer in clients.finished.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def repeated() -> list[Request]:
    """Prompts that end within a block, or at its end, and come again."""
    prompt = random.Random(1).choices(range(500), k=2 * 64)
    cut = prompt[: 64 + 7]
    named = {"whole": prompt, "cut": cut, "other": [*cut, 1, 2, 3]}
    return [Request(f"{name} {i}", tokens, 20, GREEDY) for i in range(3) for name, tokens in named.items()]


def test_a_prompt_that_is_cached_whole_is_continued_in_a_copy(assembly: Assembly, judge: Judge) -> None:
    clients = answered(assembly, repeated(), apart=25)
    judge.check_all(clients)
    for again in ("whole 1", "cut 1"):
        answer = clients.finished[again]
        assert answer.cached_tokens == len(answer.request.prompt_ids) - 1
    assert clients.finished["other 0"].cached_tokens % assembly.limits.block_size > 0


def test_stop_tokens_end_an_answer_and_only_after_its_least_length(assembly: Assembly, judge: Judge) -> None:
    prompt = random.Random(2).choices(range(500), k=50)
    free = answered(assembly, [Request("free", prompt, 40, GREEDY)]).finished["free"]
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    requests = [Request(f"{n}", prompt, 40, GREEDY, stop_token_ids=[stop], min_tokens=n) for n in (0, first, first + 1)]
    clients = answered(assembly, requests)
    judge.check_all(clients)
    assert len(clients.finished["0"].token_ids) == len(clients.finished[f"{first}"].token_ids) == first + 1
    assert len(clients.finished[f"{first + 1}"].token_ids) > first + 1


# -- what the judge sees ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A runner that makes one kind of mistake."""

    runner: Runner
    spoil_plan: Callable[[StepPlan], StepPlan] = lambda plan: plan
    spoil_result: Callable[[StepResult], StepResult] = lambda result: result

    @property
    def overlaps(self) -> bool:
        return self.runner.overlaps

    def submit(self, plan: StepPlan) -> StepHandle:
        return _WrongStep(self.runner.submit(self.spoil_plan(plan)), self.spoil_result)


@dataclass(frozen=True)
class _WrongStep:
    handle: StepHandle
    spoil: Callable[[StepResult], StepResult]

    def result(self) -> StepResult:
        return self.spoil(self.handle.result())


def in_another_block(plan: StepPlan) -> StepPlan:
    """A decode reads somebody else's first block."""
    slices = [
        msgspec.structs.replace(s, block_ids=[s.block_ids[0] ^ 1, *s.block_ids[1:]])
        if s.request_id == "r3" and s.num_tokens == 1 and len(s.block_ids) > 1
        else s
        for s in plan.slices
    ]
    return msgspec.structs.replace(plan, slices=slices)


def without_copies(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, copies=[])


def one_position_early(plan: StepPlan) -> StepPlan:
    slices = [msgspec.structs.replace(s, start=s.start - 1) if s.start == 96 else s for s in plan.slices]
    return msgspec.structs.replace(plan, slices=slices)


def with_two_answers_exchanged(result: StepResult) -> StepResult:
    if len(result.sampled) < 3 or None in result.sampled:
        return result
    first, second, *rest = result.sampled
    return StepResult([second, first, *rest])


@pytest.mark.parametrize("assembly", [CPU, *GPUS], indirect=True)  # mistakes are the judge's to see
@pytest.mark.parametrize("spoil", [in_another_block, without_copies, one_position_early, with_two_answers_exchanged])
def test_a_mistake_is_seen(assembly: Assembly, judge: Judge, spoil: Callable[..., object]) -> None:
    which = "spoil_result" if spoil is with_two_answers_exchanged else "spoil_plan"
    spoiled = replace(assembly, runner=Wrong(assembly.runner, **{which: spoil}))  # type: ignore[arg-type]
    clients = answered(spoiled, repeated() if spoil is without_copies else workload(0, greedy=True)[:8], apart=2)
    with pytest.raises(AssertionError):
        judge.check_all(clients)
