"""Gets a model's tokenizer and chat template from a replica that has them, once, and again when all have others."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from penstock.api import tokenizer_bundle as model_text
from penstock.core.errors import PenstockError
from penstock.core.replica import ReplicaState
from penstock.gateway.replicas.fetch import fetch
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.tokens.prompt_tokenizer import PromptTokenizer
from penstock.gateway.tokens.prompt_tokens import PromptTokens
from penstock.http import clock as clocks
from penstock.http.call import Failure

_PAUSE_S = 5.0  # after one that could not be had
_TIMEOUT_S = 60.0
_MAX_BYTES = 128 << 20  # the largest vocabularies come to a quarter of that

log = logging.getLogger(__name__)


class ModelTexts:
    """Tokenizer and texts of one pool. Replicas of two versions may run side by side: what is known is kept as long as
    one has it."""

    def __init__(self, tokens: PromptTokens, threads: Executor) -> None:
        self._tokens = tokens
        self._threads = threads
        self._digests: dict[str, str] = {}  # by replica
        self._getting: asyncio.Task[None] | None = None

    def replica_changed(self, replica: Replica) -> None:
        if replica.snapshot.state is ReplicaState.OUT:
            self._digests.pop(replica.id, None)
        elif replica.text:
            self._digests[replica.id] = replica.text
            prompt_tokenizer = self._tokens.prompt_tokenizer
            is_known = prompt_tokenizer is not None and prompt_tokenizer.digest in self._digests.values()
            if not is_known and self._getting is None:
                self._getting = asyncio.get_running_loop().create_task(self._get(replica))

    def replica_removed(self, replica: Replica) -> None:
        self._digests.pop(replica.id, None)

    async def _get(self, replica: Replica) -> None:
        try:
            path = model_text.PATH.encode()
            answer = await fetch(replica.upstream, path, replica.headers, timeout_s=_TIMEOUT_S, most_bytes=_MAX_BYTES)
            if isinstance(answer, Failure):
                raise PenstockError(answer.message)
            if answer.status != 200:
                raise PenstockError(f"the replica answered {answer.status}")
            build = asyncio.get_running_loop().run_in_executor(self._threads, _build, answer.body)
            self._tokens.prompt_tokenizer = await build
        except Exception as error:  # the tokenizer is foreign code and raises nothing narrower
            log.warning("a model's tokenizer could not be had, so its prompts are bounded, not counted: %s", error)
            await clocks.sleep(replica.upstream.clock, _PAUSE_S)
        finally:
            self._getting = None


def _build(body: bytes) -> PromptTokenizer:
    try:
        return PromptTokenizer(model_text.decode(body), model_text.digest(body))
    except ValueError as error:
        raise PenstockError(f"what the replica sent is not understood: {error}") from None
