"""Turns of a conversation as they are put to a server: the body of a chat or of a plain completion. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from penstock.workload.conversations import Message, Turn

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class Speech:
    model: str
    endpoint: Endpoint = "chat"
    ignore_eos: bool = True  # answers have the lengths that were asked for
    fields: dict[str, Any] = field(default_factory=dict)  # of every body; null takes one of ours out

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, messages: Sequence[Message], turn: Turn, session: str | None = None) -> bytes:
        """`messages` are all so far, the answers among them; a plain completion is sent their texts in one."""
        asked: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            asked["messages"] = messages
        else:
            asked["prompt"] = "".join(str(message["content"]) for message in messages)
        asked |= {"max_tokens": turn.output_tokens, "temperature": 0, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if session is not None:
            asked["user"] = session
        asked |= self.fields | turn.body
        return msgspec.json.encode({name: value for name, value in asked.items() if value is not None})
