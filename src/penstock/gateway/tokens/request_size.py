"""How large a request is: what is reserved for it, what its replica is expected to be busy with, whether it fits.

Cheap numbers first: a bound for limits, an estimate for load. Only where the bound leaves a doubt is the prompt
counted, and then everything follows from the count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from penstock.core.errors import ContextLengthExceeded, Overloaded, PenstockError, RequestAborted
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.replica import UNBOUNDED, ReplicaState
from penstock.gateway.proxy.request_view import UNMETERED, RequestView
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.tokens.byte_hashes import BLOCK_BYTES, byte_names
from penstock.gateway.tokens.prompt_tokenizer import (
    CHAT,
    COMPLETION,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    HashedPrompt,
)
from penstock.gateway.tokens.prompt_tokens import PromptTokens
from penstock.gateway.tokens.tokenizer_source import ModelTexts

_UNKNOWN_OUTPUT = 4096  # tokens, where neither a client nor a context limits it
_GENERATES = (CHAT, COMPLETION, MESSAGES, RESPONSES)
TERSE_BYTES = 64  # by which a response's request may be shorter than the same chat's
_MARKS, _ASKING = 4, 80  # tokens around each of several texts; where it is read together with another
_NAMED_BYTES = 1024  # of a body, from which on its prompt may have a whole routing block
_MAX_NAMING = 16  # prompts of a model in the threads' queue; then requests rather go without names than wait
_MAX_COUNTING = 64  # prompts of a model in the threads' queue; each may take a good part of a second

log = logging.getLogger(__name__)


class Pool:
    """Pool of one model's replicas: its tokenizer, and how much they hold."""

    def __init__(self, threads: Executor, served_as: str = "") -> None:
        """`served_as`: the model's name at its replicas."""
        self.served_as = served_as
        self.tokens = PromptTokens(threads)
        self.texts = ModelTexts(self.tokens, threads)
        self.least_context = UNBOUNDED
        self.most_context = UNBOUNDED
        self.num_replicas = self.num_ready = 0
        self.num_holders = 0  # the ready, and those that drain and still hand over KV blocks
        self._contexts: dict[str, int] = {}
        self._ready: set[str] = set()
        self._draining: set[str] = set()  # with a KV transfer

    def replica_changed(self, replica: Replica) -> None:
        self.texts.replica_changed(replica)
        snapshot = replica.snapshot
        (self._ready.add if snapshot.state is ReplicaState.READY else self._ready.discard)(replica.id)
        has_kv = snapshot.state is ReplicaState.DRAINING and snapshot.kv_address != ""
        (self._draining.add if has_kv else self._draining.discard)(replica.id)
        self._count()
        if snapshot.state is not ReplicaState.OUT and self._contexts.get(replica.id) != snapshot.limits.max_model_len:
            self._contexts[replica.id] = snapshot.limits.max_model_len
            self.least_context, self.most_context = min(self._contexts.values()), max(self._contexts.values())
        if self.tokens.prompt_tokenizer is not None:
            self.tokens.prompt_tokenizer.max_context = self.most_context

    def replica_removed(self, replica: Replica) -> None:
        self.texts.replica_removed(replica)
        self._ready.discard(replica.id)
        self._draining.discard(replica.id)
        self.num_replicas -= 1
        self._count()
        if self._contexts.pop(replica.id, None) is not None and self._contexts:
            self.least_context, self.most_context = min(self._contexts.values()), max(self._contexts.values())

    def _count(self) -> None:
        self.num_ready = len(self._ready)
        self.num_holders = self.num_ready + len(self._draining)

    @property
    def ready_replicas(self) -> frozenset[str]:
        return frozenset(self._ready)

    def context_left(self, prompt_tokens: int) -> int:
        return max(1, self.most_context - prompt_tokens) if self.most_context < UNBOUNDED else _UNKNOWN_OUTPUT


class Size:
    __slots__ = (
        "_body",
        "_drops_turns",
        "_ids",
        "_is_cut",
        "_is_put_in",
        "_least_output",
        "_namespace",
        "_num_prompts",
        "_num_texts",
        "_path",
        "_sees",
        "_text",
        "block_tokens",
        "choices",
        "exact",
        "has_limit",
        "hashes",
        "is_final",
        "most",
        "output",
        "pool",
        "prompt",
    )

    def __init__(
        self, pool: Pool, path: bytes, body: bytes, view: RequestView, output: int | None, namespace: str
    ) -> None:
        """`output` is the limit of one choice; None: nobody has set any. `namespace` is that of the tenant's prefix
        cache: what is remembered of its prompts is nobody else's."""
        self.pool = pool
        self._namespace = namespace
        self.output = output
        self.exact: int | None = None
        self.hashes: tuple[int, ...] = ()  # of the prompt's routing blocks, once it is named
        self.block_tokens = ROUTING_TOKENS  # in each of them
        self._ids = b""  # of the prompt, once it is named, as the tokenizer of this digest has them
        self._text = ""
        prompt_tokenizer, n = pool.tokens.prompt_tokenizer, view.choices_per_prompt
        texts = 0 if path in _GENERATES else view.num_texts
        self._num_texts = texts
        is_unmetered = path in UNMETERED
        # Images say nothing by their bytes: a request that may show some is counted, and nothing is learnt of it.
        self._sees = path in _GENERATES and prompt_tokenizer is not None and prompt_tokenizer.may_see(body)
        # Nothing more exact can be had.
        self.is_final = prompt_tokenizer is None or is_unmetered or (texts > 0 and path != EMBEDDINGS)
        self.choices = choices = texts or (n if path != COMPLETION else view.num_choices)
        n = n if not texts else 1
        self._num_prompts = choices // n
        self._path = path
        self._body = body
        # Where the context does not leave so much: cut to what it does, and not refused.
        self.has_limit = has_limit = view.output_limit is not None
        self._is_cut = not has_limit or path in (MESSAGES, RESPONSES)
        self._drops_turns = path == RESPONSES and view.drops_turns
        self._least_output = 1 if self._is_cut or output is None else output
        self._is_put_in = not has_limit and output is not None and path != COMPLETION
        most = (
            len(body)
            if prompt_tokenizer is None
            else prompt_tokenizer.bound(body, self._sees)
            if not view.has_template_arguments
            else UNBOUNDED
        )
        if is_unmetered:
            most = 0
        if path == RESPONSES:
            most += TERSE_BYTES
        if texts:
            paired = view.paired_bytes
            most += texts * (paired + _ASKING if paired else _MARKS)
        context = pool.most_context * self._num_prompts  # no model takes more than that
        self.most = most if most < context else context  # tokens of the prompt: a bound, or as many as it has
        estimate = pool.tokens.estimate(len(body))
        self.prompt = estimate if estimate < self.most else self.most  # as such prompts have, or as it has
        if is_unmetered:
            self.prompt = 1  # it passes in no time, but nothing that is admitted takes none

    def is_in_doubt(self, max_input: int | None) -> bool:
        if self.is_final:
            return False
        if self._sees or (max_input is not None and self.most > max_input):
            return True
        if self._num_prompts > 1 or self._num_texts:
            return False
        if self._is_put_in:  # and refused by the replica if it does not fit, which its client has not deserved
            return self.most + self.fitting_output > self.pool.least_context
        return self.prompt + self._least_output > self.pool.least_context  # else it is for the replica to judge

    def check(self, max_input: int | None) -> None:
        """Whether a tenant may ask so much at all."""
        if max_input is None or self.most <= max_input:
            return
        if self.exact is not None:
            raise ContextLengthExceeded(
                f"the prompt has {self.exact} tokens; this tenant's limit is {max_input}", reason="max_input"
            )
        if self.prompt > max_input:
            raise ContextLengthExceeded(
                f"the prompt has about {self.prompt} tokens, judging by earlier ones (they cannot be counted "
                f"here); this tenant's limit is {max_input}",
                reason="max_input",
            )

    def count(self, then: Callable[[PenstockError | None], None]) -> None:
        """Called back at once for a short prompt, from the event loop for a long one; with what is wrong with it."""
        tokens = self.pool.tokens
        self.is_final = True
        if tokens.num_counting >= _MAX_COUNTING:
            then(Overloaded("too many prompts wait to be counted", reason="counting", retry_after_s=1.0))
            return
        try:
            counted = tokens.count(self._path, self._body, self._namespace)
        except Exception as error:  # the tokenizer is foreign code and raises nothing narrower
            then(self._failed(error))
            return
        if isinstance(counted, int):
            self._is(counted)
            then(None)
        else:
            counted.add_done_callback(lambda done: then(self._counted(done)))

    @property
    def is_worth_naming(self) -> bool:
        """Several replicas may hold a part of the prompt, which may have a block's length; and few wait already."""
        pool, tokens = self.pool, self.pool.tokens
        if self._path not in _GENERATES:
            return False
        return len(self._body) >= _NAMED_BYTES and pool.num_holders > 1 and tokens.num_counting < _MAX_NAMING

    def name(self, view: RequestView, tenant: str, adapter: str, then: Callable[[PenstockError | None], None]) -> bool:
        """Returns whether it is named: its blocks are remembered, or are of bytes. Else `then` is called back, from the
        event loop. `tenant`: its namespace."""
        prompt_tokenizer = self.pool.tokens.prompt_tokenizer
        if prompt_tokenizer is None:
            self.hashes = byte_names(view, f"{tenant}\0{adapter}" if adapter else tenant)
            self.block_tokens = max(1, self.pool.tokens.estimate(BLOCK_BYTES))
            return True
        self._text = prompt_tokenizer.digest
        named = self.pool.tokens.names(self._path, self._body, tenant, adapter)
        if isinstance(named, HashedPrompt):
            self._is_named(named)
            return True
        named.add_done_callback(lambda done: then(self._was_named(done)))
        return False

    def _was_named(self, done: asyncio.Future[HashedPrompt]) -> PenstockError | None:
        if done.cancelled():
            return RequestAborted("the gateway is stopping")
        if (error := done.exception()) is not None:
            return self._failed(error)
        self._is_named(done.result())
        return None

    def ids_for(self, text: str) -> bytes:
        """The prompt's token ids, in JSON, if they are known and those of a replica with this tokenizer; or nothing."""
        return self._ids if self._text == text else b""

    def _is_named(self, named: HashedPrompt) -> None:
        if self._is_shortened(named.num_tokens):
            self._is(named.num_tokens)
            return
        self.hashes = named.hashes
        self._ids = b"[[%b]]" % named.ids if named.ids else b""
        self.is_final = True
        self._is(named.num_tokens)

    def _counted(self, done: asyncio.Future[int]) -> PenstockError | None:
        if done.cancelled():
            return RequestAborted("the gateway is stopping")
        if (error := done.exception()) is not None:
            return self._failed(error)
        self._is(done.result())
        return None

    def _failed(self, error: BaseException) -> PenstockError | None:
        """A prompt that was not counted since it is longer than any context: one token more will do to say so."""
        if not isinstance(error, ContextLengthExceeded):
            return _told(error)
        self.is_final = True
        self._is(self.pool.most_context + 1)
        return None

    def _is_shortened(self, tokens: int) -> bool:
        """Whether its replica leaves turns out of so long a prompt: what is left of it, the replica knows."""
        return self._drops_turns and tokens >= self.pool.least_context

    def _is(self, tokens: int) -> None:
        self.is_final = True
        if self._is_shortened(tokens):
            tokens = self.pool.least_context - 1
        self.exact = self.most = self.prompt = tokens

    # -- what follows

    @property
    def max_tokens(self) -> int:
        """Output tokens of all choices together, as far as the context may let them."""
        output = self.output
        if output is None or self._is_cut:
            left = self.pool.context_left(self.prompt)
            output = left if output is None or output > left else output
        return output * self.choices

    @property
    def reserved(self) -> int:
        """Never less than what it will use: no choice is longer than a context."""
        context, output = self.pool.most_context, self.output
        if output is None:
            if context == UNBOUNDED:
                return self.most + self.choices * _UNKNOWN_OUTPUT
            if self.exact is None:
                return self.choices * context
            return self.most + self.choices * max(0, context - self.most)
        total, limit = self.most + self.choices * output, self.choices * context
        return total if total < limit else limit

    @property
    def most_used(self) -> tuple[int, int]:
        """Tokens of prompt and output, of a request of which nobody could tell."""
        prompt = self.most if self.most < UNBOUNDED else self.prompt
        return prompt, max(0, self.reserved - self.most)

    @property
    def context_tokens(self) -> int:
        """Tokens that it surely needs of a replica's context: those of one choice."""
        if self._num_texts:  # what is longer may be cut, which its replica knows
            return 1
        return (self.exact if self.exact is not None and self._num_prompts == 1 else 1) + self._least_output

    @property
    def fitting_output(self) -> int:
        """An output limit that the client did not ask for: it must not be what its request is refused for."""
        assert self.output is not None
        return self.output if self.exact is None else max(1, min(self.output, self.pool.most_context - self.exact))

    def learn(self, prompt_tokens: int) -> None:
        if not self._num_texts and not self._sees:  # they say nothing about prompts
            self.pool.tokens.learn(len(self._body), prompt_tokens)


def _told(error: BaseException) -> PenstockError | None:
    """Returns the error to tell if the request is wrong; where the tokenizer fails, None: the bound has to do."""
    if isinstance(error, PenstockError):
        return error
    log.error("a prompt could not be counted", exc_info=error)
    return None
