"""The default model on the native kernels in float32 says what transformers says, from the same weights.

That the torch reference says the same is `test_gpu_model`'s to show: it holds the native kernels to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.hub.convert import convert_to_hf
from penstock.hub.resolve import resolve
from penstock.model.loading import load_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.text.tokenizer import Tokenizer
from tests.equality.inprocess import InProcess
from tests.equality.reference import assert_greedy, assert_logprobs, reference_logits

pytestmark = pytest.mark.slow

MAX_TOKENS = 24
TEXTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about the wind.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Die Katze sitzt auf",
    "A",
    "Once upon a time, in a village between two rivers,",
    "Water boils at 100 degrees. Ice melts at",
]
PASSAGE = "The lock keeper opened the gate, and the river, which had waited all night, ran down the old mill race. "


class Default:
    """The default model as transformers runs it."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = resolve("smollm2")
        self.tokenizer = Tokenizer.load(self.checkpoint.tokenizer_source)
        special_tokens = self.tokenizer.special_tokens()
        convert_to_hf(
            self.checkpoint, directory, tokenizer_json=self.tokenizer.to_json(), special_tokens=special_tokens
        )
        self._theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._logits: dict[tuple[int, ...], Tensor] = {}
        short = [self.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        self.prompts = [*short, self.tokenizer.encode(PASSAGE * 15, add_special_tokens=False)[:300]]

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Kept: everybody who is right asks for the same ones."""
        key = (*prompt, *output)
        if key not in self._logits:
            self._logits[key] = reference_logits(self._theirs, prompt, output)
        return self._logits[key]


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Default:
    directory = tmp_path_factory.mktemp("smollm2")
    default = Default(directory)
    (directory / "model.safetensors").unlink()  # half a gigabyte that nobody needs any longer
    return default


@pytest.fixture(scope="module")
def engine(default: Default) -> InProcess:
    """After all prompts: arriving one after the other, chunked, sharing what they can, short of blocks."""
    try:
        ops = NativeOps("float32", threads=1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    model = load_model(default.checkpoint, ops)
    engine = InProcess(model, ops, block_size=16, num_blocks=36, chunk_tokens=100, max_num_seqs=10)
    params = SamplingParams(temperature=0.0, num_logprobs=5)
    requests = [Request(str(i), ids, MAX_TOKENS, sampling=params) for i, ids in enumerate(default.prompts)]
    engine.run(*reversed(requests), apart=1)
    engine.run(Request("again", default.prompts[-1], 8, sampling=params))
    return engine


def test_greedy_output(engine: InProcess, default: Default) -> None:
    assert default.tokenizer.decode(engine.outputs["0"]).startswith(" Paris")
    for i, prompt in enumerate(default.prompts):
        output = engine.outputs[str(i)]
        assert len(output) == MAX_TOKENS
        assert_greedy(default.logits(prompt, output), output)
    assert engine.preemptions > 0


def test_logprobs(engine: InProcess, default: Default) -> None:
    for i, prompt in enumerate(default.prompts):
        output = engine.outputs[str(i)]
        assert_logprobs(default.logits(prompt, output), output, engine.logprobs[str(i)])


def test_prefix_hit(engine: InProcess) -> None:
    assert engine.cached["again"] >= 200
    assert engine.outputs["again"] == engine.outputs[str(len(TEXTS))][:8]
