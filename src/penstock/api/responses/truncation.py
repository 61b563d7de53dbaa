"""Truncation of a conversation that is longer than a context: whole turns go, the oldest first."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.api.openai import ChatRequest


def without_oldest(chat: ChatRequest, fits: Callable[[ChatRequest], bool]) -> ChatRequest | None:
    """The chat without as few of its oldest turns as it takes to fit; None: not even its last turn does.

    System prompts at the beginning stay. The rest that stays begins with a user's message, so that no result of a tool
    is told without its call. `fits` is asked about as many chats as a binary search needs.
    """
    messages = chat.messages
    first = next((at for at, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    cuts = [at for at in range(first + 1, len(messages)) if messages[at].role == "user"]

    def cut(at: int) -> ChatRequest:
        return msgspec.structs.replace(chat, messages=[*messages[:first], *messages[at:]])

    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if fits(cut(cuts[middle])):
            high = middle
        else:
            low = middle + 1
    return cut(cuts[low]) if low < len(cuts) else None
