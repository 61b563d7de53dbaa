"""A conversation becomes the one text that the model was trained to continue.

Chat templates are Jinja programs that come with a model, and they are not trusted: they run in a sandbox, with the
environment that transformers gives them. This module knows no roles and no tokens; the template does. It knows whether
the template takes tools, and in which format its model calls them and writes its thoughts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core.errors import InvalidRequest, ModelUnsupported
from penstock.text import reasoning, tools

_PROBE = "penstock"


class ChatTemplate:
    def __init__(
        self,
        template: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        """None is a model without a template: it cannot chat. `tool_format` is one of `tools.FORMATS` and
        `reasoning_format` one of `reasoning.FORMATS` or `none`, if they are not to be told from the template."""
        self.source = template
        self.tool_format = tools.choose(template or "", tool_format)
        self.reasoning = reasoning.choose(template or "", reasoning_format)
        self.knows_tools = bool(template) and re.search(r"\btools\b", template or "") is not None
        self._template = _compile(template) if template is not None else None
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # A token that a model does not have stays undefined, which renders as nothing; None would render as "None".
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    @cached_property
    def takes_strings(self) -> bool:
        """Whether a message's content may be one text. Templates of some models that take images read it part by part,
        and say nothing of a text that is none."""
        try:
            return _PROBE in self.render([{"role": "user", "content": _PROBE}])
        except InvalidRequest:
            return True

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        # Templates test `tools is not none`, which is true of a name that is not defined.
        context = {"tools": None, "documents": None, **self._tokens, **variables}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except Exception as error:  # the template is a foreign program and may fail in any way on what it is given
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from None


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelUnsupported(f"the model's chat template does not compile: {error}") from None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
