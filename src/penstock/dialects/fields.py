"""Fields of a client's request that a server of another kind is sent. What is not named here is refused by its name.

An engine's API is made for whoever runs it: beside sampling it takes paths of adapters, other requests' cache salts,
places in its queue, pickled code and hosts to connect to. So a field is forwarded because it is known to be harmless,
never because it is unknown. The tables of `engines` add what each kind of server understands besides; an operator adds
fields with `forward_fields`. A field whose value is null asks for nothing, and is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from penstock.core.errors import InvalidRequest, ThreadUnsupported, UnsupportedParameter
from penstock.dialects.dialect import Dialect, names_in

CHAT, COMPLETIONS, MESSAGES = b"/v1/chat/completions", b"/v1/completions", b"/v1/messages"
RESPONSES = b"/v1/responses"  # asked for as a chat
EMBEDDINGS, RERANK, SCORE, CLASSIFY = b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/classify"
TOKENIZE, DETOKENIZE, RENDER = b"/tokenize", b"/detokenize", b"/v1/chat/completions/render"
COUNT_TOKENS = b"/v1/messages/count_tokens"
GENERATES = (CHAT, COMPLETIONS, MESSAGES)

_MAX_ECHO = 100  # characters of a client's own words that an error repeats
_NULL = msgspec.Raw(b"null")

_SAMPLING = names_in(
    "model max_tokens temperature top_p n stop seed presence_penalty frequency_penalty logit_bias logprobs stream "
    "stream_options user metadata safety_identifier prompt_cache_key store service_tier response_format "
    # not OpenAI's, but of nearly all who speak like it
    "top_k min_p repetition_penalty"
)
_TEXTS = names_in("model user truncate_prompt_tokens")

_CHAT = _SAMPLING | names_in(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls functions function_call "
    "modalities audio prediction reasoning_effort verbosity web_search_options moderation prompt_cache_options "
    "prompt_cache_retention reasoning thinking enable_thinking include_reasoning"
)
_TEMPLATE = names_in("add_generation_prompt continue_final_message chat_template_kwargs")

FIELDS: Mapping[bytes, frozenset[str]] = {
    CHAT: _CHAT,
    COMPLETIONS: _SAMPLING | names_in("prompt suffix echo best_of"),
    MESSAGES: names_in(
        "model messages max_tokens system metadata stop_sequences stream temperature top_p top_k tools tool_choice "
        "thinking service_tier speed cache_control output_config output_format context_management compaction"
    ),
    EMBEDDINGS: _TEXTS
    | names_in("input encoding_format dimensions input_type truncate add_special_tokens normalize embed_dtype"),
    RERANK: _TEXTS
    | names_in("query documents top_n return_documents rank_fields max_tokens_per_doc max_chunks_per_doc"),
    SCORE: _TEXTS | names_in("text_1 text_2 encoding_format"),
    CLASSIFY: _TEXTS | names_in("input add_special_tokens use_activation activation"),
    TOKENIZE: _TEMPLATE | names_in("model prompt messages add_special_tokens return_token_strs tools"),
    DETOKENIZE: names_in("model tokens"),
    RENDER: _CHAT | _TEMPLATE,
    COUNT_TOKENS: names_in("model messages system tools tool_choice thinking output_config output_format"),
}

# Values that cost no more than the operator's price, where others would: a provider's faster lanes are billed apart.
_VALUES = {
    "service_tier": ("auto", "default", "flex", "standard_only"),
    "speed": ("standard",),
}

# Arguments of transformers' apply_chat_template itself: as a template's variables they change how it is applied.
_NO_VARIABLES = names_in(
    "conversation messages tools documents chat_template tokenize padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs processor_kwargs"
)
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_fields(
    dialect: Dialect, path: bytes, members: dict[str, msgspec.Raw], forward_fields: Collection[str] = ()
) -> None:
    """Raises for the first field that such a server must not be sent, and drops those that are null."""
    known = FIELDS.get(path, frozenset())
    generates = path in GENERATES
    lacks = dialect.lacks.get(path, {})
    for name, value in list(members.items()):
        if name in forward_fields:
            continue
        is_known = name in known or (generates and (name in dialect.fields or name == dialect.salt))
        if value == _NULL:
            if not is_known:
                del members[name]
        elif not is_known:
            shown = name[:_MAX_ECHO]
            if name == "thread" and path == MESSAGES:
                raise ThreadUnsupported("thread: is not supported by this server", param=name)
            raise UnsupportedParameter(
                f"{shown}: this field is not forwarded to the model's servers, unless their operator allows it "
                "(forward_fields)",
                param=shown,
            )
        elif name in lacks and _value(value) not in lacks[name]:
            raise UnsupportedParameter(f"{name}: this model's server does not have it", param=name)
        elif name in _VALUES:
            _check_value(name, value)
        elif name == "chat_template_kwargs":
            _check_variables(name, value)


def _value(value: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return value  # what is wrong with it, the server will say


def _check_value(name: str, value: msgspec.Raw) -> None:
    allowed = _VALUES[name]
    if value not in [msgspec.Raw(msgspec.json.encode(one)) for one in allowed]:
        raise UnsupportedParameter(f"{name}: only {', '.join(map(repr, allowed))} can be had here", param=name)


def _check_variables(name: str, value: msgspec.Raw) -> None:
    try:
        variables = _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(f"{name}: expected an object", param=name) from None
    for variable in variables.keys() & _NO_VARIABLES:
        raise UnsupportedParameter(f"{name}.{variable}: this is no variable of a template", param=f"{name}.{variable}")
