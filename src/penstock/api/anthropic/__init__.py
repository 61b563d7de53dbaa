"""The Anthropic wire format: requests in (`messages`), answers out (`responses`, `events`)."""

from penstock.api.anthropic import events
from penstock.api.anthropic.messages import CountTokensRequest, MessagesRequest, parse_count_tokens, parse_messages
from penstock.api.anthropic.responses import MessageHead, Stop, Usage, message, token_count

__all__ = [
    "CountTokensRequest",
    "MessageHead",
    "MessagesRequest",
    "Stop",
    "Usage",
    "events",
    "message",
    "parse_count_tokens",
    "parse_messages",
    "token_count",
]
