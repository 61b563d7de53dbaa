"""The quality of watermarks: `python -m tools.watermark [--model smollm2] [--prompts 48] [--trials 4000]`.

Three tables. The rate at which unmarked human text is taken for marked, beside what its p-value promises: windows of
Python's reference manual, each under a fresh key. The rate at which marked text is found, by length: what the model
writes after windows of that manual, found again in its text by the detector. The cost of the mark: perplexity of the
marked text by the model's own, unmarked, probabilities, and the time that choosing takes with it. With --trials 0 or
--prompts 0 their part is left out.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch

from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.core.watermark import KEY_BYTES, Scheme, Seeding, Watermark
from penstock.hub.resolve import resolve
from penstock.runner.assemble import assemble
from penstock.runner.sampler import sample
from penstock.sched.plan import Runner, SampleSpec, Slice, StepPlan
from penstock.text.tokenizer import Tokenizer
from penstock.text.watermark import SIGNIFICANT, detect

PROMPT, OUTPUT, BATCH = 64, 200, 16  # tokens, tokens, sequences
LENGTHS = (25, 50, 100, 200)
LEVELS = (0.05, 0.01, 0.001, SIGNIFICANT)


def marks(secret: bytes) -> dict[str, Watermark | None]:
    return {
        "none": None,
        "green, delta 1": Watermark(secret, delta=1.0),
        "green, delta 2": Watermark(secret, delta=2.0),
        "green, delta 4": Watermark(secret, delta=4.0),
        "green, delta 2, self": Watermark(secret, delta=2.0, seeding=Seeding.SELF),
        "gumbel": Watermark(secret, Scheme.GUMBEL),
    }


def false_positives(manual: Sequence[int], trials: int, rng: random.Random) -> None:
    print(f"unmarked text: share of {trials} windows, each under a fresh key, with a p-value of at most")
    print(f"{'':24}{'tokens':>8}" + "".join(f"{level:>10}" for level in LEVELS))
    for name in ("green, delta 2", "green, delta 2, self", "gumbel"):
        for length in (50, 200, 800):
            values = []
            for _ in range(trials):
                start = rng.randrange(len(manual) - length)
                mark = marks(rng.randbytes(KEY_BYTES))[name]
                assert mark is not None
                values.append(detect(list(manual[start : start + length]), mark).p_value)
            shares = [sum(value <= level for value in values) / trials for level in LEVELS]
            print(f"{name:24}{length:8}" + "".join(f"{share:10.5f}" for share in shares), flush=True)


@dataclass
class Writing:
    """One sequence that is being written."""

    name: str
    ids: list[int]
    params: SamplingParams
    block_ids: Sequence[int]
    scores: list[float] = field(default_factory=list)  # log probabilities of its own tokens, unmarked

    def slice(self) -> Slice:
        start = len(self.ids) - 1 if self.scores else 0
        spec = SampleSpec(self.params, self.ids, PROMPT, len(self.ids))
        return Slice(self.name, start, len(self.ids) - start, self.ids[start:], self.block_ids, spec, epoch=0)


def write(
    runner: Runner, prompts: list[list[int]], mark: Watermark | None, eos: Sequence[int], block_size: int
) -> tuple[list[Writing], float]:
    """All of them, and how long a step took."""
    blocks = -(-(PROMPT + OUTPUT) // block_size)
    sequences = [
        Writing(
            f"{row}",
            list(prompt),
            SamplingParams(seed=row, num_logprobs=0, watermark=mark, logit_bias=dict.fromkeys(eos, -100.0)),
            range(row * blocks, (row + 1) * blocks),
        )
        for row, prompt in enumerate(prompts)
    ]
    spent_s = 0.0
    for step in range(OUTPUT):
        began_s = time.perf_counter()
        result = runner.submit(StepPlan([one.slice() for one in sequences])).result()
        spent_s += (time.perf_counter() - began_s) if step else 0.0  # without the prompts
        for one, sampled in zip(sequences, result.sampled, strict=True):
            assert sampled is not None
            assert sampled.logprobs is not None
            one.ids += sampled.token_ids
            one.scores.append(sampled.logprobs[0].logprob)
    return sequences, spent_s / (OUTPUT - 1)


def true_positives(model: str, manual: Sequence[int], tokenizer: Tokenizer, num_prompts: int) -> None:
    checkpoint = resolve(model)
    settings = EngineSettings(max_num_seqs=BATCH, chunk_tokens=BATCH * PROMPT, max_model_len=PROMPT + OUTPUT)
    assembly = assemble(checkpoint, settings, lambda *_: None)
    gap = len(manual) // num_prompts
    prompts = [list(manual[i * gap : i * gap + PROMPT]) for i in range(num_prompts)]
    print(
        f"marked text, {num_prompts} answers of {OUTPUT} tokens, temperature 1: share found (p-value {SIGNIFICANT:g})"
    )
    heads = "".join(f"{length:>8}" for length in LENGTHS)
    print(f"{'':24}{heads}{'perplexity':>12}{'of unmarked, 95 %':>24}{'ms a step of ' + str(BATCH):>18}")
    unmarked: list[float] = []
    secret = random.Random(7).randbytes(KEY_BYTES)
    for name, mark in marks(secret).items():
        written: list[Writing] = []
        steps = []
        for first in range(0, num_prompts, BATCH):
            found, step_s = write(
                assembly.runner,
                prompts[first : first + BATCH],
                mark,
                checkpoint.config.eos_token_ids,
                assembly.limits.block_size,
            )
            written += found
            steps.append(step_s)
        texts = [tokenizer.decode(one.ids[PROMPT:]) for one in written]
        shares = [_share_found(texts, mark or Watermark(secret), tokenizer, length) for length in LENGTHS]
        means = [-math.fsum(one.scores) / len(one.scores) for one in written]
        unmarked = unmarked or means
        ratio, low, high = _ratio([own - base for own, base in zip(means, unmarked, strict=True)])
        print(
            f"{name:24}"
            + "".join(f"{share:8.2f}" for share in shares)
            + f"{math.exp(math.fsum(means) / len(means)):12.2f}{f'{ratio:.2f}x ({low:.2f} to {high:.2f})':>24}"
            + f"{1e3 * min(steps):18.1f}",
            flush=True,
        )


def _ratio(differences: list[float]) -> tuple[float, float, float]:
    """Returns the ratio of perplexities, prompt by prompt, and between what it is with 95 %."""
    count = len(differences)
    mean = math.fsum(differences) / count
    error = 1.96 * math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (count - 1) / count)
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)


def sampling_times(vocab_size: int) -> None:
    """Prints times of the CPU alone, which others' work does not lengthen much."""
    print(f"choosing a token from {vocab_size} on one thread, ms of CPU time a row")
    torch.set_num_threads(1)
    history = list(range(500))
    for rows in (1, 16):
        logits = torch.randn(rows, vocab_size)
        for name, mark in marks(bytes(KEY_BYTES)).items():
            specs = [SampleSpec(SamplingParams(watermark=mark), [*history, row], 10, 501) for row in range(rows)]
            best_s = min(_cpu_s(logits, specs) for _ in range(20))
            print(f"{name:24}{rows:4} rows{1e3 * best_s / rows:10.2f}", flush=True)


def _cpu_s(logits: torch.Tensor, specs: list[SampleSpec]) -> float:
    began_s = time.process_time()
    sample(logits, specs)
    return time.process_time() - began_s


def _share_found(texts: list[str], mark: Watermark, tokenizer: Tokenizer, length: int) -> float:
    """Returns the share found among texts of so many tokens, tokenized anew as a detector has to."""
    cut = [tokenizer.encode(text, add_special_tokens=False)[:length] for text in texts]
    return sum(detect(ids, mark).p_value <= SIGNIFICANT for ids in cut) / len(cut)


def main() -> None:
    parser = argparse.ArgumentParser(description="How often watermarks are found, and what they cost.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--trials", type=int, default=4000)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(resolve(arguments.model).tokenizer_source)
    manual = tokenizer.encode("\n".join(topics.values()), add_special_tokens=False)
    if arguments.trials:
        false_positives(manual, arguments.trials, random.Random(1))
        sampling_times(tokenizer.vocab_size)
    if arguments.prompts:
        true_positives(arguments.model, manual, tokenizer, arguments.prompts)


if __name__ == "__main__":
    main()
