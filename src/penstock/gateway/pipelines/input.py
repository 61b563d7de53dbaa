"""A client's request for a pipeline: its messages or its prompt, and the fields that steps may be sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from penstock.core.errors import InvalidRequest, UnsupportedParameter, UnsupportedTask
from penstock.gateway.pipelines.graph import ModelStep, Pipeline, Task
from penstock.gateway.pipelines.model_call import CHAT_PATH, COMPLETION_PATH
from penstock.gateway.pipelines.types import MAX_NESTING, is_deep

_TASKS = {CHAT_PATH: Task.CHAT, COMPLETION_PATH: Task.COMPLETION}
# Fields that make another kind of answer: they are refused unless a step is sent them.
_OF_FORM = (
    "tools", "functions", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex",
    "ebnf",
)  # fmt: skip
_TEXTS = ("text", "refusal")  # types of parts
_COUNTS = ("n", "best_of")


class PipelineInput(NamedTuple):
    task: Task  # what the client asked for
    values: dict[str, Any]  # of the edges that begin with `input`
    fields: dict[str, Any]  # of the client's request
    is_stream: bool
    has_usage: bool  # its stream is to end with the usage
    has_steps: bool  # the answer is to tell what each step used


def read_input(path: bytes, body: bytes, pipeline: Pipeline) -> PipelineInput:
    """Raises InvalidRequest and its kinds."""
    task = _TASKS.get(path)
    if task is None:
        raise UnsupportedTask(
            f"'{pipeline.name}' is a pipeline: it is asked at /v1/chat/completions or /v1/completions", param="model"
        )
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if is_deep(fields):
        raise InvalidRequest(f"the body is nested more than {MAX_NESTING} times")
    for name in _COUNTS:
        if fields.get(name) not in (None, 1):
            raise UnsupportedParameter(f"a pipeline has one answer: {name} is 1", param=name)
    forwarded = _forwarded(pipeline)
    for name in _OF_FORM:
        if fields.get(name) not in (None, False, [], {"type": "text"}) and name not in forwarded:
            raise UnsupportedParameter(f"no step of '{pipeline.name}' takes {name}", param=name)
    is_stream = bool(fields.get("stream"))
    options = fields.get("stream_options")
    has_steps = fields.get("include_steps") or False
    if not isinstance(has_steps, bool):
        raise InvalidRequest("include_steps: expected true or false", param="include_steps")
    has_usage = has_steps or (isinstance(options, dict) and bool(options.get("include_usage")))
    values = _of_chat(fields, pipeline) if task is Task.CHAT else _of_completion(fields)
    metadata = fields.get("metadata")
    values["metadata"] = metadata if isinstance(metadata, dict) else {}
    return PipelineInput(task, values, fields, is_stream, is_stream and has_usage, has_steps)


def _forwarded(pipeline: Pipeline) -> set[str]:
    models: Iterable[ModelStep] = (step for step in pipeline.root.walk() if isinstance(step, ModelStep))
    return {name for step in models for name in step.forward or ()}


def _of_chat(fields: dict[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: expected a list of messages, one or more", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}]: expected a message with a role", param="messages")
    said = [message for message in messages if message["role"] == "user"]
    if said and not pipeline.reads_messages:
        _check_is_text(said[-1], messages.index(said[-1]), pipeline)
    return {"messages": messages, "text": _text_of(said[-1]) if said else ""}


def _check_is_text(message: dict[str, Any], index: int, pipeline: Pipeline) -> None:
    """Raises for parts other than text, images above all: steps that read the text alone would drop them silently."""
    content = message.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type", "text") not in _TEXTS:
            where = f"messages[{index}].content[{at}]"
            raise UnsupportedParameter(f"{where}: steps of '{pipeline.name}' read the text alone", param=where)


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = [part for part in content or () if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _of_completion(fields: dict[str, Any]) -> dict[str, Any]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt: a pipeline takes one text", param="prompt")
    return {"messages": [{"role": "user", "content": prompt}], "text": prompt}
