"""How fast texts become vectors: `python -m tools.embeddings [--model minilm] [--texts 256]`.

The sentences of Python's reference manual, through the embedder that would serve them: one at a time, and in batches by
tokens. Where transformers is installed, the same sentences by it, 32 at a time, sorted by length and padded, as
sentence-transformers does. The ways take turns, and the best of three counts.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import numpy as np
import torch

from penstock.core.clock import MonotonicClock
from penstock.engine.embedding import EmbedQueue
from penstock.engine.messages import Embed
from penstock.hub.encoder import EncoderCheckpoint
from penstock.hub.resolve import resolve
from penstock.runner.embedder import encoder_embedder
from penstock.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


def sentences(count: int) -> list[str]:
    found = re.findall(r"[A-Z][^.]{20,400}\.", " ".join(topics["specialnames"].split()))
    return (found * (1 + count // len(found)))[:count]


def batched(queue: EmbedQueue, texts: list[list[int]], *, at_once: bool) -> bytes:
    """As requests of one text each, all there at once or one after another."""
    answers = []
    for number, text in enumerate(texts):
        queue.add(Embed(str(number), [text]))
        if not at_once:
            answers += queue.step().answers
    while queue.has_work:
        answers += queue.step().answers
    return b"".join(answer.values for answer in sorted(answers, key=lambda answer: int(answer.request_id)))


def padded(path: str, texts: list[list[int]]) -> Callable[[], bytes]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path).eval()
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))

    @torch.inference_mode()
    def run() -> bytes:
        rows = [b""] * len(texts)
        for first in range(0, len(order), 32):
            part = order[first : first + 32]
            longest = len(texts[part[0]])
            ids = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in part])
            mask = torch.tensor([[1] * len(texts[i]) + [0] * (longest - len(texts[i])) for i in part])
            states = model(ids, attention_mask=mask).last_hidden_state * mask[:, :, None]
            pooled = torch.nn.functional.normalize(states.sum(dim=1) / mask.sum(dim=1, keepdim=True), dim=1)
            for i, row in zip(part, pooled.numpy(), strict=True):
                rows[i] = row.tobytes()
        return b"".join(rows)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast texts become vectors.")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = resolve(arguments.model)
    assert isinstance(checkpoint, EncoderCheckpoint)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    texts = tokenizer.encode_batch(sentences(arguments.texts), add_special_tokens=True)
    texts = [ids[: checkpoint.config.context_length] for ids in texts]
    queue = EmbedQueue(encoder_embedder(checkpoint, CPU), MonotonicClock())
    ways: dict[str, Callable[[], bytes]] = {
        "one at a time": lambda: batched(queue, texts, at_once=False),
        "batched by tokens": lambda: batched(queue, texts, at_once=True),
    }
    with contextlib.suppress(ImportError):
        ways["transformers, padded"] = padded(str(checkpoint.path), texts)
    best: dict[str, float] = {}
    vectors: dict[str, bytes] = {}
    for _ in range(3):
        for name, way in ways.items():
            began_s = time.perf_counter()
            vectors[name] = way()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - began_s)
    expected = np.frombuffer(vectors["one at a time"], np.float32)
    num_tokens = sum(map(len, texts))
    print(f"{len(texts)} sentences, {num_tokens} tokens, {arguments.threads} threads")
    for name, seconds in best.items():
        off = np.abs(np.frombuffer(vectors[name], np.float32) - expected).max()
        print(
            f"{name:22}{len(texts) / seconds:8.0f} texts/s{num_tokens / seconds:10.0f} tokens/s"
            f"   {best['one at a time'] / seconds:.2f}x   largest difference {off:.1e}"
        )


if __name__ == "__main__":
    main()
