"""The OpenAI wire format: requests in (`chat`, `completions`), answers out (`responses`, `chunks`, `models`)."""

from penstock.api.openai.chat import ChatRequest, Content, Message, parse_chat
from penstock.api.openai.chunks import ChatChunks, CompletionChunks
from penstock.api.openai.completions import CompletionRequest, parse_completion
from penstock.api.openai.generation import GenerationOptions, GenerationRequest, check_token_ids, for_choice
from penstock.api.openai.models import ModelCard, model_list, model_object
from penstock.api.openai.responses import (
    Call,
    Choice,
    ResponseHead,
    ScoredToken,
    Usage,
    chat_completion,
    named_by_id,
    new_id,
    text_completion,
)
from penstock.api.openai.tools import FunctionDefinition, ToolChoice

__all__ = [
    "Call",
    "ChatChunks",
    "ChatRequest",
    "Choice",
    "CompletionChunks",
    "CompletionRequest",
    "Content",
    "FunctionDefinition",
    "GenerationOptions",
    "GenerationRequest",
    "Message",
    "ModelCard",
    "ResponseHead",
    "ScoredToken",
    "ToolChoice",
    "Usage",
    "chat_completion",
    "check_token_ids",
    "for_choice",
    "model_list",
    "model_object",
    "named_by_id",
    "new_id",
    "parse_chat",
    "parse_completion",
    "text_completion",
]
