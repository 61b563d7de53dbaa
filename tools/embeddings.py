"""The speed at which texts become vectors: `python -m tools.embeddings [--model minilm] [--texts 256]`.

The sentences of Python's reference manual, through the embedder that would serve them: one at a time, and in batches by
tokens. Where transformers is installed, the same sentences by it, 32 at a time, sorted by length and padded, as
sentence-transformers does. The ways take turns, and the best of three counts.

Without files, with random weights and texts of 8 to 256 random tokens, most of them short:

    python -m tools.embeddings --random 12x768 --texts 4096 --device cuda --dtype bfloat16   # an encoder
    python -m tools.embeddings --shape llama8b --texts 2048                                   # a decoder
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
from tools.host_kv_engine import Engine, start

from penstock.core.clock import MonotonicClock
from penstock.engine.embedding import Embedder, EmbedQueue
from penstock.engine.messages import Embed
from penstock.hub.encoder import EncoderCheckpoint
from penstock.hub.resolve import resolve
from penstock.runner.embedder import EncoderEmbedder, encoder_embedder
from penstock.text.tokenizer import Tokenizer

Ways = dict[str, Callable[[], bytes]]


def sentences(count: int) -> list[str]:
    found = re.findall(r"[A-Z][^.]{20,400}\.", " ".join(topics["specialnames"].split()))
    return (found * (1 + count // len(found)))[:count]


def random_texts(count: int, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3.5, 0.9, count), 8, 256).astype(int)
    return [rng.integers(vocab_size, size=length).tolist() for length in lengths]


def batched(queue: EmbedQueue, texts: list[list[int]], *, at_once: bool, scored: int | None = None) -> bytes:
    """Returns vectors of requests of one text each, all at once or one by one. `scored`: so many tokens of each."""
    answers = []
    for number, text in enumerate(texts):
        queue.add(Embed(str(number), [text], None if scored is None else [scored]))
        if not at_once:
            answers += queue.step(MonotonicClock()).answers
    while queue.has_work:
        answers += queue.step(MonotonicClock()).answers
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


def embedding_ways(embedder: Embedder, texts: list[list[int]]) -> Ways:
    queue = EmbedQueue(embedder)
    return {
        "one at a time": lambda: batched(queue, texts, at_once=False),
        "batched by tokens": lambda: batched(queue, texts, at_once=True),
    }


def of_files(model: str, count: int) -> tuple[list[list[int]], Ways]:
    checkpoint = resolve(model)
    assert isinstance(checkpoint, EncoderCheckpoint)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    texts = tokenizer.encode_batch(sentences(count), add_special_tokens=True)
    texts = [ids[: checkpoint.config.context_length] for ids in texts]
    ways = embedding_ways(encoder_embedder(checkpoint, torch.device("cpu")), texts)
    with contextlib.suppress(ImportError):
        ways["transformers, padded"] = padded(str(checkpoint.path), texts)
    return texts, ways


def of_random_encoder(shape: str, count: int, device: str, dtype: str) -> tuple[list[list[int]], Ways]:
    from tests.model.random_encoder import random_encoder

    layers, hidden = map(int, shape.split("x"))
    encoder = random_encoder(layers, hidden, device, getattr(torch, dtype))
    texts = random_texts(count, encoder.config.vocab_size)
    return texts, embedding_ways(EncoderEmbedder(encoder, "mean", torch.device(device)), texts)


def of_decoder(engine: Engine, count: int) -> tuple[list[list[int]], Ways]:
    embedder, texts = engine.made.embedder, random_texts(count, engine.vocab_size)
    assert embedder is not None
    ways = embedding_ways(embedder, texts)
    queue = EmbedQueue(embedder)
    return texts, ways | {"scored, 6 tokens each": lambda: batched(queue, texts, at_once=True, scored=6)}


def compare(texts: list[list[int]], ways: Ways, rounds: int = 3) -> None:
    best: dict[str, float] = {}
    vectors: dict[str, bytes] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            began_s = time.perf_counter()
            vectors[name] = way()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - began_s)
    expected = np.frombuffer(vectors["one at a time"], np.float32)
    num_tokens = sum(map(len, texts))
    print(f"{len(texts)} texts, {num_tokens} tokens, {torch.get_num_threads()} threads")
    for name, seconds in best.items():
        found = np.frombuffer(vectors[name], np.float32)
        off = f"   largest difference {np.abs(found - expected).max():.1e}" if found.shape == expected.shape else ""
        print(
            f"{name:22}{len(texts) / seconds:8.0f} texts/s{num_tokens / seconds:10.0f} tokens/s"
            f"   {best['one at a time'] / seconds:.2f}x{off}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast texts become vectors.")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--random", metavar="LAYERSxWIDTH", help="an encoder without files")
    parser.add_argument("--shape", help="of a decoder without files; one of `penstock bench engine`'s")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of --random")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of --random")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.shape:
        compare(*of_decoder(start(given.shape, None, None), given.texts))
    elif given.random:
        compare(*of_random_encoder(given.random, given.texts, given.device, given.dtype))
    else:
        compare(*of_files(given.model, given.texts))


if __name__ == "__main__":
    main()
