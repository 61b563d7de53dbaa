"""Gets a model's tokenizer and chat template from a replica that has them, once, and again when all have others."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from penstock.api import model_text
from penstock.core.errors import PenstockError
from penstock.core.replica import ReplicaState
from penstock.gateway.http.call import Failure
from penstock.gateway.http.message import ResponseHead
from penstock.gateway.lexicon import Lexicon
from penstock.gateway.prompt_tokens import PromptTokens
from penstock.gateway.replicas import Replica

_PAUSE_S = 5.0  # after one that could not be had

log = logging.getLogger(__name__)


class ModelTexts:
    """Of one pool. Replicas of two versions may run side by side: as long as one has what is known, that is kept."""

    def __init__(self, tokens: PromptTokens, threads: Executor) -> None:
        self._tokens = tokens
        self._threads = threads
        self._digests: dict[str, str] = {}  # by replica
        self._is_getting = False

    def replica_changed(self, replica: Replica) -> None:
        if replica.snapshot.state is ReplicaState.OUT:
            self._digests.pop(replica.id, None)
        elif replica.text:
            self._digests[replica.id] = replica.text
            lexicon = self._tokens.lexicon
            is_known = lexicon is not None and lexicon.digest in self._digests.values()
            if not is_known and not self._is_getting:
                self._is_getting = True
                replica.upstream.send(b"GET", model_text.PATH.encode(), replica.headers, b"", _Getting(self))

    def got(self, body: bytes) -> None:
        built = asyncio.get_running_loop().run_in_executor(self._threads, _build, body)
        built.add_done_callback(self._built)

    def failed(self, why: str) -> None:
        log.warning("a model's tokenizer could not be had, so its prompts are bounded, not counted: %s", why)
        asyncio.get_running_loop().call_later(_PAUSE_S, self._done)

    def _built(self, done: asyncio.Future[Lexicon]) -> None:
        error = done.exception() if not done.cancelled() else None
        if error is not None:
            self.failed(str(error))
        elif not done.cancelled():
            self._tokens.lexicon = done.result()
            self._done()

    def _done(self) -> None:
        self._is_getting = False


class _Getting:
    """Receives one answer."""

    def __init__(self, texts: ModelTexts) -> None:
        self._texts = texts
        self._parts: list[bytes] = []
        self._status = 0

    def head(self, head: ResponseHead) -> None:
        self._status = head.status

    def data(self, data: bytes, is_last: bool) -> None:
        self._parts.append(data)
        if is_last and self._status == 200:
            self._texts.got(b"".join(self._parts))
        elif is_last:
            self._texts.failed(f"the replica answered {self._status}")

    def failed(self, failure: Failure) -> None:
        self._texts.failed(failure.message)


def _build(body: bytes) -> Lexicon:
    try:
        return Lexicon(model_text.decode(body), model_text.digest(body))
    except ValueError as error:
        raise PenstockError(f"what the replica sent is not understood: {error}") from None
