"""Thoughts that are kept to a budget, and guides that begin after them, over a real vocabulary."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.core.errors import UnsupportedParameter
from penstock.core.guide import Guide
from penstock.core.request import FinishReason, Request
from penstock.core.sampling import SamplingParams
from penstock.core.thinking import Thinking
from penstock.engine.guides import Guides
from penstock.sched.guiding import TokenGuide
from penstock.text.reasoning import FORMATS, AnswerParser
from penstock.text.reasoning.harmony import END, TO_CALL
from penstock.text.tools.parts import ReasoningText, Text
from tests.engine.expecting import engine, read
from tests.engine.test_guided_drafts import run
from tests.text.walking import EOS, allowed, tokenizer, vocabulary

PERSON = Guide(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
    ),
)
MAX_TOKENS = 400


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return found


def said(token_ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer().token_bytes, token_ids)).decode(errors="replace")


def thinking(budget: int | None = None, name: str = "think", opened: bool = True, is_guided: bool = True) -> Thinking:
    known = FORMATS[name]
    opening = known.tags.opens[0] if known.tags is not None else ""
    end = "<|start|>assistant" if known.tags is None else f"{opening}\n" if opened else "assistant\n"
    return Thinking(
        name, end, budget, ids(known.closing), ids(known.gap) if is_guided else [], ids(opening) if opening else []
    )


def request(guide: Guide | None = PERSON, **options: Any) -> Request:
    options = {"thinking": thinking(5, is_guided=guide is not None)} | options
    return Request("a", [5, 6, 7], MAX_TOKENS, stop_token_ids=[EOS], guide=guide, **options)


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(vocabulary())


def answer(wanted: Request, seed: int, guides: Guides, write: Sequence[int] = ()) -> list[int]:
    """Tokens at random among those that may come, after what is written first."""
    source, live, found, first = random.Random(seed), guides.open(wanted), list[int](), list(write)
    while len(found) < MAX_TOKENS:
        choices = allowed(live.bits())
        token_id = first.pop(0) if first else source.choice(choices)
        assert token_id in choices
        found.append(token_id)
        if wanted.guide is None and token_id == EOS:
            return found
        follow = live.take(token_id)
        assert follow.finish is not FinishReason.ERROR, follow.error
        found += follow.token_ids
        if follow.finish is not None:
            return found
        guides.go()
    return found


def parsed(token_ids: Sequence[int], wanted: Request) -> tuple[str, str]:
    """Thoughts and answer, as a server tells them apart."""
    assert wanted.thinking is not None
    splitter = FORMATS[wanted.thinking.format].splitter(wanted.thinking.prompt_end)
    parser = AnswerParser(splitter, None, None)
    text = b"".join(tokenizer().token_bytes(one) for one in token_ids if one != EOS).decode(errors="replace")
    parts = [*parser.push(text), *parser.flush(is_cut=False)]
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return thought, "".join(part.text for part in parts if isinstance(part, Text))


def is_person(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["name", "kind"] and found["kind"] in ("cat", "dog")


@pytest.mark.parametrize("seed", range(6))
def test_thoughts_end_when_their_budget_is_used_up_and_the_guide_begins(seed: int, guides: Guides) -> None:
    wanted = request()
    thought, person = parsed(answer(wanted, seed, guides), wanted)
    assert thought
    assert is_person(person)


def test_a_budget_is_counted_in_tokens_and_ends_within_no_character(guides: Guides) -> None:
    emoji = ids("🙂🙃")
    assert len(ids("🙃")) == 2
    wanted = request(None, thinking=thinking(len(emoji) - 1, is_guided=False))
    found = answer(wanted, 1, guides, write=emoji)
    closing = ids(FORMATS["think"].closing)
    assert found[: len(emoji) + len(closing)] == [*emoji, *closing]
    assert parsed(found, wanted)[0].strip() == "🙂🙃"


def test_thoughts_without_a_budget_end_where_the_model_ends_them(guides: Guides) -> None:
    wanted = request(thinking=thinking())
    written = ids("Hm. Is it so?</think>")
    found = answer(wanted, 2, guides, write=written)
    gap = ids(FORMATS["think"].gap)
    assert found[len(written) : len(written) + len(gap)] == gap
    thought, person = parsed(found, wanted)
    assert thought == "Hm. Is it so?"
    assert is_person(person)


def test_no_token_ends_an_answer_that_has_not_followed_its_guide(guides: Guides) -> None:
    live = guides.open(request())
    assert EOS not in allowed(live.bits())
    free = guides.open(request(None))
    assert EOS in allowed(free.bits())
    early = guides.open(request(None, min_tokens=2))
    assert EOS not in allowed(early.bits())


def test_a_model_that_opens_its_thoughts_itself_chooses(guides: Guides) -> None:
    """Its first token opens them, or is its answer's."""
    wanted = request(thinking=thinking(3, opened=False))
    (opening,) = ids("<think>")
    (brace,) = ids("{")
    assert {opening, brace} <= set(allowed(guides.open(wanted).bits()))
    thought, person = parsed(answer(wanted, 3, guides, write=[opening]), wanted)
    assert thought
    assert is_person(person)
    found = answer(wanted, 3, guides, write=[brace])
    assert parsed(found, wanted)[0] == ""
    assert is_person(parsed(found, wanted)[1])


def test_a_guide_that_allows_the_opening_mark_has_it(guides: Guides) -> None:
    wanted = request(Guide("regex", "<think>[ab]{3}"), thinking=thinking(3, opened=False))
    found = answer(wanted, 1, guides, write=ids("<think>"))
    assert said(found).startswith("<think>")
    assert len(said(found).removeprefix("<think>").removesuffix("</s>")) == 3


def test_text_that_comes_with_the_mark_is_the_beginning_of_the_answer(guides: Guides) -> None:
    """One token is both; what follows is what the guide allows after it."""
    wanted = request(Guide("regex", "12345 [ab]{2}"), thinking=thinking())
    live = guides.open(wanted)
    path = [*ids("Hm.</think"), *ids(">")]
    assert said(path) == "Hm.</think>"
    live.bits()
    guide = live._guide  # type: ignore[union-attr]
    assert guide is not None
    guide.bits()
    follow = guide.begin_after(9, b"123")
    assert follow.finish is None
    assert {said([one])[0] for one in allowed(guide.bits())} == {"4"}


def test_channels_of_harmony_are_kept_to_a_budget_and_the_final_one_to_the_guide(guides: Guides) -> None:
    wanted = request(thinking=thinking(4, "harmony"))
    found = answer(wanted, 4, guides, write=ids("<|channel|>analysis<|message|>"))
    thought, person = parsed(found, wanted)
    assert thought
    assert is_person(person)
    assert said(found).count("<|channel|>final<|message|>") == 1


@pytest.mark.parametrize("budget", [None, 4, 0])
def test_a_guide_may_begin_within_the_header_of_a_call(guides: Guides, budget: int | None) -> None:
    """As where a call must come: what is forced ends before the function's name."""
    end = "<|start|>assistant<|channel|>analysis<|message|>"
    wanted = request(Guide("regex", "(f|g) json"), thinking=Thinking("harmony", end, budget, ids(END), ids(TO_CALL)))
    found = said(answer(wanted, 4, guides, write=[] if budget is not None else ids(f"Hm.{END}")))
    thought, _, call = found.partition(f"{END}{TO_CALL}")
    assert call.removesuffix("</s>") in ("f json", "g json")
    assert budget is None or len(ids(thought)) >= budget


def test_channels_without_a_guide_may_be_thoughts_again_and_end_at_once(guides: Guides) -> None:
    wanted = request(None, thinking=thinking(4, "harmony", is_guided=False))
    first = ids("<|channel|>analysis<|message|>a b c d")
    end = ids("<|end|>")
    again = ids("<|start|>assistant<|channel|>analysis<|message|>")
    live = guides.open(wanted)
    live.bits()
    forced = [follow for one in first if (follow := live.take(one).token_ids)]
    assert forced == [end]
    forced = [follow for one in again if (follow := live.take(one).token_ids)]
    assert forced == [end]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["think", "harmony"])
def test_an_answer_does_not_depend_on_how_its_forced_tokens_came(seed: int, name: str, guides: Guides) -> None:
    """All at once, or one by one because each is scored."""
    first = ids("<|channel|>analysis<|message|>") if name == "harmony" else []

    def written(**options: Any) -> list[int]:
        """The lowest id that may come: forced tokens take no random numbers."""
        wanted = request(thinking=thinking(seed, name), sampling=SamplingParams(**options))
        live, found, begun = guides.open(wanted), list[int](), list(first)
        while len(found) < MAX_TOKENS:
            choices = allowed(live.bits())
            found.append(begun.pop(0) if begun else choices[(7 * len(found) + seed) % len(choices)])
            follow = live.take(found[-1])
            found += follow.token_ids
            if follow.finish is not None:
                break
            guides.go()
        return found

    assert written() == written(num_logprobs=0)


def masks_by(live: TokenGuide, guides: Guides, path: Sequence[int]) -> list[set[int]]:
    found, known = [], list[int]()
    for token_id in path:
        found.append(set(allowed(live.bits())))
        if known:
            assert known.pop(0) == token_id
            continue
        follow = live.take(token_id)
        known = list(follow.token_ids)
        guides.go()
        if follow.finish is not None:
            break
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("opened", [True, False])
def test_masks_of_drafts_are_those_of_the_tokens_that_come(seed: int, opened: bool, guides: Guides) -> None:
    """Wherever drafts begin and however many there are: before, across and after the end of the thoughts."""
    wanted = request(thinking=thinking(seed, opened=opened), sampling=SamplingParams(num_logprobs=0))
    whole = answer(wanted, seed, guides)
    expected = masks_by(guides.open(wanted), guides, whole)
    source = random.Random(seed)
    for start in range(0, len(expected) - 2, 3):
        live = guides.open(wanted)
        masks_by(live, guides, whole[:start])
        if not live.is_quick:  # a sequence whose guide is slow has no drafts
            continue
        count = source.randint(1, min(8, len(expected) - start - 1))
        masks = live.ahead(whole[start : start + count])
        assert set(allowed(live.bits())) == expected[start]
        assert [set(allowed(mask.bits())) for mask in masks] == expected[start + 1 : start + 1 + count]


@pytest.mark.parametrize("opened", [True, False])
def test_an_answer_begun_elsewhere_goes_on_where_it_was(opened: bool, guides: Guides) -> None:
    wanted = request(thinking=thinking(6, opened=opened), sampling=SamplingParams(num_logprobs=0))
    whole = answer(wanted, 9, guides, write=() if opened else ids("<think>"))
    expected = masks_by(guides.open(wanted), guides, whole)
    for cut in range(1, len(expected)):
        live = guides.open(request(thinking=wanted.thinking, output_ids=whole[:cut]))
        assert set(allowed(live.bits())) == expected[cut], cut


def test_what_breaks_off_its_forced_tokens_cannot_be_carried_on(guides: Guides) -> None:
    closing = ids(FORMATS["think"].closing)
    live = guides.open(request(output_ids=[*(5 * ids("a")), closing[0], closing[0]]))
    follow = live.take(allowed(live.bits())[0])
    assert follow.finish is FinishReason.ERROR
    assert "generated elsewhere" in str(follow.error)


@pytest.mark.parametrize("guess", [lambda s: [], lambda s: s.token_ids[-3:], lambda s: ids("</think>\n\n{")])
def test_through_the_scheduler_with_drafts(guess: Callable[[Any], list[int]], guides: Guides) -> None:
    wanted = request(thinking=thinking(9))
    events, _ = run(wanted, guess, guides)
    found = [token_id for event in events for token_id in event.token_ids]
    assert is_person(parsed(found, wanted)[1])
    plain = [token_id for event in run(wanted, lambda s: [], guides)[0] for token_id in event.token_ids]
    assert found == plain


async def test_in_an_engine_process_beside_others() -> None:
    options: dict[str, Any] = {"is_guided": True, "vocab_size": tokenizer().vocab_size}
    async with engine(**options, overlaps=True, num_blocks=60) as client:
        asked = [
            Request(
                f"r{seed}",
                [5, 6, 7],
                120,
                SamplingParams(seed=seed),
                [EOS],
                guide=PERSON if seed % 2 else None,
                thinking=thinking(seed, is_guided=bool(seed % 2)) if seed < 6 else None,
            )
            for seed in range(8)
        ]
        events = await read(client.open(asked), *(one.id for one in asked))
    for one in asked[1:6:2]:
        found = [token_id for event in events[one.id] for token_id in event.token_ids]
        assert is_person(parsed(found, one)[1])


async def test_an_engine_without_guides_refuses_a_budget_by_name() -> None:
    async with engine() as plain:
        with pytest.raises(UnsupportedParameter, match="budget"):
            await read(plain.open([request(None)]), "a")
