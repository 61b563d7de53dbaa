"""The cost of guided output: `python -m tools.guided_cost --url http://127.0.0.1:8000 --model smollm2`.

Three kinds of request by turns, so that what else the machine does hits all alike: free text; text that follows a guide
in which nothing is forced, so that every token needs its mask; and a JSON schema, where much is forced. Prints the time
per output token of each, and that of a guide relative to free text. With --library it measures llguidance alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from statistics import mean, median, quantiles
from typing import Any

import aiohttp

PROPERTIES = {
    "first_name": {"type": "string", "maxLength": 12},
    "last_name": {"type": "string", "maxLength": 12},
    "date_of_birth": {"type": "string", "format": "date"},
    "email": {"type": "string", "format": "email", "maxLength": 24},
    "is_active": {"type": "boolean"},
    "country": {"enum": ["France", "Germany", "Italy", "Spain", "Portugal"]},
    "favourite_numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "regex": {"guided_regex": "[A-Za-z ,.]*"},
    "schema": {"guided_json": SCHEMA},
}


async def ask(session: aiohttp.ClientSession, args: argparse.Namespace, kind: str, seed: int) -> tuple[float, int]:
    """Seconds from the first token to the last, and how many there were."""
    body = {
        "model": args.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": args.tokens,
        "seed": seed,
        "messages": [{"role": "user", "content": f"Describe a person. ({seed})"}],
        **KINDS[kind],
    }
    body |= {"min_tokens": args.tokens} if kind == "regex" else {}
    first_s = last_s = 0.0
    count = 0
    async with session.post(f"{args.url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                last_s = time.perf_counter()
                first_s = first_s or last_s
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return last_s - first_s, count


async def measure(args: argparse.Namespace) -> None:
    async with aiohttp.ClientSession() as session:
        for kind in KINDS:
            await ask(session, args, kind, 0)  # what is made once is made now
        for concurrency in args.concurrency:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(args.rounds):
                for kind in KINDS:
                    seeds = range(turn * 100, turn * 100 + concurrency)
                    answers = await asyncio.gather(*(ask(session, args, kind, seed) for seed in seeds))
                    times[kind].append(mean(1e3 * seconds / max(1, count - 1) for seconds, count in answers))
            found = {kind: median(values) for kind, values in times.items()}
            ratios = ", ".join(f"{kind} {value:.2f} ms ({value / found['free']:.2f}x)" for kind, value in found.items())
            print(f"concurrency {concurrency:3}: per token {ratios}")
        print(f"mixed, {max(args.concurrency)} at once, free and guided by turns:", await mixed(session, args))


async def mixed(session: aiohttp.ClientSession, args: argparse.Namespace) -> str:
    """Returns what guided neighbours do to free requests."""
    count = max(args.concurrency)
    values: dict[str, list[float]] = {"free": [], "regex": []}
    for turn in range(args.rounds):
        for neighbour, times in values.items():
            kinds = ["free" if i % 2 else neighbour for i in range(count)]
            answers = await asyncio.gather(*(ask(session, args, kind, turn * 100 + i) for i, kind in enumerate(kinds)))
            free = [answer for kind, answer in zip(kinds, answers, strict=True) if kind == "free"]
            times.append(mean(1e3 * seconds / max(1, tokens - 1) for seconds, tokens in free))
    alone, beside = median(values["free"]), median(values["regex"])
    return f"free beside free {alone:.2f} ms a token, beside guided {beside:.2f} ({beside / alone:.2f}x)"


def library(model: str) -> None:
    from penstock.core.guide import Guide
    from penstock.hub.resolve import resolve
    from penstock.text.grammars import Matcher, Vocabulary, Words
    from penstock.text.tokenizer import Tokenizer

    checkpoint = resolve(model)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    began_s = time.perf_counter()
    vocabulary = Vocabulary(Words.of(tokenizer, checkpoint.config.vocab_size, checkpoint.config.eos_token_ids))
    print(f"vocabulary of {vocabulary.size}: {time.perf_counter() - began_s:.2f} s")
    answer = json.dumps(
        {
            "first_name": "Ada",
            "last_name": "Lovelace",
            "date_of_birth": "1815-12-10",
            "email": "ada@example.org",
            "is_active": False,
            "country": "Italy",
            "favourite_numbers": [1843, 7, 12],
        }
    )
    makes: list[float] = []
    masks: list[float] = []
    takes: list[float] = []
    jumped = total = 0
    for _ in range(20):
        began_s = time.perf_counter()
        matcher = Matcher(vocabulary, Guide("json_schema", json.dumps(SCHEMA)))
        makes.append(time.perf_counter() - began_s)
        left = tokenizer.encode(answer, add_special_tokens=False)
        total += len(left)
        while left and not matcher.is_over:
            began_s = time.perf_counter()
            matcher.mask()
            masks.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            token_id = left.pop(0)
            matcher.take([token_id])
            forced = matcher.forced() if not matcher.is_over else []
            takes.append(time.perf_counter() - began_s)
            if forced and forced == left[: len(forced)]:
                matcher.take(forced)
                del left[: len(forced)]
                jumped += len(forced)
    for name, values in (("matcher", makes), ("mask", masks), ("token told and forced ones found", takes)):
        print(f"{name}: median {median(values) * 1e6:.0f} µs, p99 {quantiles(values, n=100)[98] * 1e6:.0f} µs")
    print(f"{jumped / total:.0%} of the answer's tokens were forced")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--library", action="store_true")
    args = parser.parse_args()
    if args.library:
        library(args.model)
    else:
        asyncio.run(measure(args))


if __name__ == "__main__":
    main()
