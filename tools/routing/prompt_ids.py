"""The saving of a penstock replica that is sent a prompt's token ids by a gateway that has them.

    python -m tools.routing.prompt_ids

Both ways from the body of a chat request to its ids, with the default model's tokenizer, in turns; medians.
"""

import json
import statistics
import time
from collections.abc import Callable

import msgspec

from penstock.api.openai import parse_chat
from penstock.api.relay import open_envelope, sealed
from penstock.hub.resolve import resolve
from penstock.text.chat import ChatTemplate
from penstock.text.prompt_encoder import render
from penstock.text.tokenizer import Tokenizer

ROUNDS = 15
TURN = "The river is wide here, 40 metres at least; who crosses it by boat needs an hour, and longer in the spring. "


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began_s)


def main() -> None:
    source = resolve("smollm2").tokenizer_source
    tokenizer = Tokenizer.load(source)
    template = ChatTemplate(source.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def by_text(body: bytes) -> list[int]:
        return tokenizer.encode(render(template, parse_chat(body)), add_special_tokens=False)

    def by_ids(envelope: bytes) -> list[int]:
        found = open_envelope(envelope)
        parse_chat(bytes(found.request))
        assert found.prompt_ids is not None
        return found.prompt_ids[0]

    for num_turns in (2, 14, 110, 440):
        roles = ["user", "assistant"] * (num_turns // 2) + ["user"]
        body = json.dumps({"model": "m", "messages": [{"role": role, "content": TURN * 3} for role in roles]}).encode()
        ids = by_text(body)
        envelope = sealed(body, msgspec.json.encode([ids]))
        assert by_ids(envelope) == ids
        times = [(timed(lambda: by_text(body)), timed(lambda: by_ids(envelope))) for _ in range(ROUNDS)]  # noqa: B023
        text_ms, ids_ms = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{len(ids):6} tokens: {text_ms:7.2f} ms by text, {ids_ms:6.2f} ms by ids; {len(body):,} and "
            f"{len(envelope):,} bytes"
        )


if __name__ == "__main__":
    main()
