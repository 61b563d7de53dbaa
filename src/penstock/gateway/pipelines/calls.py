"""The work of one attempt that is done outside: a request to a model, or a call of a function. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.gateway.pipelines.edges import value_at
from penstock.gateway.pipelines.graph import ModelStep, PythonStep, Task
from penstock.gateway.pipelines.types import as_text

Values = Mapping[str, Any]


class Call(msgspec.Struct, frozen=True):
    step: ModelStep | PythonStep
    is_answer: bool  # its text may go to the client while it is made
    prompt: str = ""
    messages: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()
    is_list: bool = False  # whether there is a list of texts, or one text
    query: str = ""  # rerank: the text that documents are ranked by
    arguments: dict[str, Any] = {}


def call_of(step: ModelStep | PythonStep, scope: Values, *, is_answer: bool) -> Call:
    """Raises StepFailed."""
    if isinstance(step, PythonStep):
        return Call(step, False, arguments={name: value_at(edge, scope) for name, edge in step.inputs.items()})
    prompt = step.prompt.render(scope) if step.prompt is not None else ""
    if step.task is Task.COMPLETION:
        return Call(step, is_answer, prompt)
    if step.task is Task.CHAT:
        messages = list(value_at(step.messages, scope)) if step.messages is not None else []
        if step.system is not None:
            messages.insert(0, {"role": "system", "content": step.system.render(scope)})
        if step.prompt is not None:
            messages.append({"role": "user", "content": prompt})
        return Call(step, is_answer, messages=tuple(messages))
    if step.task is Task.TENSORS:
        return Call(step, False, arguments={name: value_at(one.edge, scope) for name, one in step.tensors.items()})
    assert step.text is not None
    found = value_at(step.text, scope)
    is_list = isinstance(found, list | tuple)
    texts = tuple(map(as_text, found)) if is_list else (as_text(found),)
    query = as_text(value_at(step.query, scope)) if step.query is not None else ""
    return Call(step, False, texts=texts, is_list=is_list, query=query)
