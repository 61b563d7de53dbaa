"""The wire format of OpenAI's Responses API: requests in (`request`, `items`, `tools`), answers out (`objects`,
`events`), and what a store keeps of them (`stored`).

A response says nothing that a chat cannot say, so a request becomes a chat request, as one of `api.anthropic` does.
"""

from penstock.api.responses.events import ResponseEvents
from penstock.api.responses.objects import ResponseHead, Usage
from penstock.api.responses.request import ResponsesRequest, parse_responses

__all__ = ["ResponseEvents", "ResponseHead", "ResponsesRequest", "Usage", "parse_responses"]
