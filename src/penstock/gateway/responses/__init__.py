"""Responses that are kept: /v1/responses/{id} and what is under it, conversations, and answers made in the background.

A request that asks for state becomes one that asks for none (`service`), and goes the way of all requests; its answer
is kept on its way to the client (`exchange`). What no client waits for is made under a lease (`background`), and its
events are kept for readers that come back (`event_log`). Replicas know nothing of it."""
