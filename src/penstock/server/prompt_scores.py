"""Log probabilities of the tokens of prompts: what `prompt_logprobs` asks for, and `echo` with `logprobs`.

A prompt is computed for them apart from its answer, as a text to be scored is: of a cached prefix nothing is known.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.api.openai import ChatRequest, CompletionRequest, ScoredToken
from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.core.request import Cost
from penstock.core.token_logprobs import TokenScore, read_rows
from penstock.engine.client import EngineClient
from penstock.engine.messages import Embed
from penstock.server.served_model import ServedModel
from penstock.text.tokenizer import Tokenizer

_MAX_SCORES = 1 << 20  # of tokens and their alternatives, in one request


class PromptScores(NamedTuple):
    prompts: list[list[ScoredToken]]
    cost: Cost


def check_scored(
    model: ServedModel, wanted: ChatRequest | CompletionRequest, prompts: list[list[int]], *, has_images: bool = False
) -> None:
    """Raises where these prompts cannot be scored, before anything runs."""
    if (num_top := wanted.num_prompt_logprobs()) is None:
        return
    param = "prompt_logprobs" if wanted.prompt_logprobs is not None else "echo"
    if has_images:
        raise UnsupportedParameter(f"{param}: cannot be had of prompts with images", param=param)
    if not model.embeds:
        raise UnsupportedParameter(f"{param}: log probabilities of prompts cannot be had of this model", param=param)
    if wanted.model != model.name:
        raise UnsupportedParameter(f"{param}: log probabilities of prompts are the base model's only", param=param)
    if sum(map(len, prompts)) * (1 + num_top) > _MAX_SCORES:
        raise InvalidRequest(f"{param}: the prompts have more than {_MAX_SCORES} log probabilities", param=param)


async def score_prompts(
    model: ServedModel, engine: EngineClient, prompts: list[list[int]], num_top: int, request_id: str
) -> PromptScores:
    answer = await engine.embeddings(Embed(request_id, prompts, num_top=num_top))
    rows = read_rows(answer.values, list(map(len, prompts)), num_top)
    scored = [_scored(model.tokenizer, ids, own) for ids, own in zip(prompts, rows, strict=True)]
    return PromptScores(scored, Cost(device_s=answer.device_s))


def _scored(tokenizer: Tokenizer, ids: list[int], scores: list[TokenScore]) -> list[ScoredToken]:
    found = [_token(tokenizer, ids[0], None)]
    for token_id, score in zip(ids[1:], scores, strict=True):
        top = [_token(tokenizer, other, value, rank) for rank, (other, value) in enumerate(score.top, 1)]
        found.append(_token(tokenizer, token_id, score.logprob, score.rank, top))
    return found


def _token(
    tokenizer: Tokenizer,
    token_id: int,
    logprob: float | None,
    rank: int | None = None,
    top: list[ScoredToken] | None = None,
) -> ScoredToken:
    raw = tokenizer.token_bytes(token_id)
    is_shown = token_id not in tokenizer.special_ids
    return ScoredToken(raw.decode(errors="replace"), raw, logprob, top or (), is_shown, token_id, rank)
