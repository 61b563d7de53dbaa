"""Checks of a gateway or a replica that runs, as a client sees it: ready, its models, and one short answer.

A check that fails ends the list: what comes after it would only say the same in other words.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.doctor.findings import Finding, fail, ok
from penstock.http.ask import Answered, ask
from penstock.http.tls import client_context
from penstock.observe.redaction import redact

KEY_VARIABLE = "PENSTOCK_API_KEY"
_MAX_TOKENS = 4
_SHOWN = 200  # characters of an error


@dataclass(frozen=True)
class Endpoint:
    url: str
    key: str | None = None  # of a tenant
    model: str | None = None  # to be asked; None: the first of the list
    ca_file: str | None = None
    server_name: str | None = None
    timeout_s: float = 60.0  # of an answer, which may have to wait for the start of a replica


def endpoint(target: Endpoint) -> Iterator[Finding]:
    try:
        tls = client_context(target.ca_file) if target.url.startswith("https://") else None
        yield from _look(target, tls)
    except ConfigError as error:
        yield fail("endpoint", error.message)
    except ssl.SSLCertVerificationError as error:
        hint = "--ca-file names the CAs to trust, --server-name what the certificate is for"
        yield fail("endpoint", f"{redact(target.url)}: {error.verify_message}", hint)
    except (OSError, http.client.HTTPException) as error:
        yield fail("endpoint", f"{redact(target.url)}: {error}", "is it running, and is the address right?")


def _look(target: Endpoint, tls: ssl.SSLContext | None) -> Iterator[Finding]:
    headers = {"content-type": "application/json"}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    get = partial(ask, target.url, headers=headers, timeout_s=target.timeout_s, tls=tls, server_name=target.server_name)
    shown = redact(target.url)
    answer = get("GET", "/ready")
    if answer.status != 200:
        yield fail("ready", f"{shown}/ready answers {_said(answer)}", "no replica is ready, and none can be waited for")
        return
    yield ok("ready", f"{shown} is ready")
    answer = get("GET", "/v1/models")
    names = [str(one["id"]) for one in _json(answer).get("data", ())]
    if answer.status != 200 or not names:
        yield fail("models", f"{shown}/v1/models answers {_said(answer)}", _hint(answer, target))
        return
    yield ok("models", ", ".join(names))
    model = target.model or names[0]
    if model not in names:
        yield fail("answer", f"there is no model '{model}'", f"its key may use: {', '.join(names)}")
        return
    asked = {"model": model, "prompt": "One, two,", "max_tokens": _MAX_TOKENS, "temperature": 0}
    answer = get("POST", "/v1/completions", msgspec.json.encode(asked))
    tokens = (_json(answer).get("usage") or {}).get("completion_tokens", 0)
    if answer.status != 200 or not tokens:
        yield fail("answer", f"{model} answers {_said(answer)}", _hint(answer, target))
        return
    yield ok("answer", f"{model} made {tokens} tokens")


def _json(answer: Answered) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _said(answer: Answered) -> str:
    """The status, and the message of an error as penstock and OpenAI write it."""
    error = _json(answer).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"{answer.status}: {message or answer.body[:_SHOWN].decode(errors='replace')}"


def _hint(answer: Answered, target: Endpoint) -> str:
    if answer.status in (401, 403):
        return (
            f"the key in ${KEY_VARIABLE} is not good for it" if target.key else f"put a tenant's key in ${KEY_VARIABLE}"
        )
    return ""
