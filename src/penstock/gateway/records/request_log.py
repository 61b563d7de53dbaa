"""One line per request, in the log, and if wanted in a file of its tenant's own: as text or as JSON.

Lines hold ids, names of the operator's and numbers: no part of an answer or a key, and none of a prompt unless the
operator wants prompts written, which then are lines of their own (`prompts`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.core.settings import setting
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.records.prompt_log import PromptSettings, PromptText
from penstock.gateway.records.tenant_files import TenantFiles
from penstock.observe.backlog import Backlog
from penstock.observe.redaction import redact

log = logging.getLogger("penstock.gateway.request")

_MAX_WAITING = 50_000  # lines
_BATCH = 100  # lines of one record: a third of a millisecond's work
_RECORD_CHARS = 64 << 10
_MAX_PROMPT_BYTES = 32 << 20  # of prompts that wait


@dataclass(frozen=True)
class LogSettings:
    format: Literal["text", "json"] = setting("text", "of the line for each request")
    tenant_directory: str | None = setting(None, "each tenant's lines also go to TENANT.log in this directory")
    tenant_file_bytes: Annotated[int, Meta(ge=1 << 16)] = setting(
        64 << 20, "a tenant's file is moved on to TENANT.log.1 when it is this large, and that one dropped"
    )
    prompts: bool = setting(False, "write down what was asked: whoever reads the log can then read it")
    prompt_chars: Annotated[int, Meta(ge=1, le=1 << 18)] = setting(4096, "of each prompt, at most")
    redact: list[str] = setting([], "patterns, besides credentials, mail addresses and long numbers, cut from prompts")


class _Prompt(NamedTuple):
    id: str
    tenant: str
    body: bytes


class RequestLog(Backlog["tuple[float, RequestFacts | _Prompt]"]):
    """`append` and `asked` belong to the event loop. A record of the logger may hold several lines, each with its own
    time."""

    def __init__(self, logger: logging.Logger = log, settings: LogSettings | None = None) -> None:
        super().__init__("request log", most=_MAX_WAITING, batch=_BATCH)
        settings = settings or LogSettings()
        self._logger = logger
        self._is_json = settings.format == "json"
        self._files = None
        if settings.tenant_directory is not None:
            self._files = TenantFiles(Path(settings.tenant_directory).expanduser(), settings.tenant_file_bytes)
        self._prompt = None
        self.wants_prompts = settings.prompts
        if settings.prompts:
            self._prompt = PromptText(PromptSettings(settings.prompt_chars, tuple(settings.redact)))
        self._asked_bytes = 0  # by the event loop
        self._told_bytes = 0  # by the thread: what is between them waits

    def append(self, facts: RequestFacts) -> None:
        self.put((time.time(), facts))

    def asked(self, request_id: str, tenant: str, body: bytes) -> None:
        """Writes what a client sent, if prompts are wanted."""
        if self._prompt is None:
            return
        if self._asked_bytes - self._told_bytes + len(body) > _MAX_PROMPT_BYTES:
            self._num_dropped += 1
            return
        self._asked_bytes += len(body)
        self.put((time.time(), _Prompt(request_id, tenant, body)))

    def write(self, batch: list[tuple[float, RequestFacts | _Prompt]]) -> None:
        lines = [(one.tenant, self._line(at_s, one)) for at_s, one in batch]
        if self._logger.isEnabledFor(logging.INFO):
            for record in _records([line for _, line in lines]):
                self._logger.info(record)
        if self._files is not None:
            self._files.write([(tenant, redact(line)) for tenant, line in lines if tenant])

    def passed(self, batch: list[tuple[float, RequestFacts | _Prompt]]) -> None:
        self._told_bytes += sum(len(one.body) for _, one in batch if isinstance(one, _Prompt))

    def close(self) -> None:
        super().close()
        if self._files is not None:
            self._files.close()

    def _line(self, at_s: float, one: RequestFacts | _Prompt) -> str:
        at = f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z"
        if not isinstance(one, _Prompt):
            return _json(at, one) if self._is_json else _text(at, one)
        assert self._prompt is not None
        text = self._prompt.of(one.body)
        if self._is_json:
            return _encoded({"at": at, "id": one.id, "tenant": one.tenant, "prompt_text": text})
        return f"{at} id={one.id} tenant={one.tenant} prompt_text={_encoded(text)}"


def _records(lines: Iterable[str]) -> Iterator[str]:
    """Several lines to a record, unless they are long: a record is searched for credentials in one go, and the event
    loop's thread gets its turn in between."""
    gathered: list[str] = []
    for line in lines:
        gathered.append(line)
        if sum(map(len, gathered)) > _RECORD_CHARS:
            yield "\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n".join(gathered)


def _text(at: str, facts: RequestFacts) -> str:
    line = (
        f"{at} id={facts.id} "
        f"tenant={facts.tenant or '-'} key={facts.key_id or '-'} surface={facts.surface} model={facts.model or '-'} "
        f"replica={facts.replica or '-'} outcome={facts.ending} reason={facts.reason or '-'} "
        f"prompt={facts.input_tokens} cached={facts.cached_tokens} output={facts.output_tokens} "
        f"queue_ms={_ms(facts.queue_s)} ttft_ms={_ms(facts.ttft_s)} total_ms={_ms(facts.total_s)} "
        f"tries={facts.num_tries}"
    )
    if facts.route != facts.model and facts.route:
        line += f" route={facts.route}"
    if facts.version not in ("", facts.model):
        line += f" version={facts.version}"
    if facts.rule:
        line += f" rule={facts.rule}"
    if facts.steps:
        line += f" steps={len(facts.steps)}"
    if facts.step_of:
        line += f" step_of={facts.step_of}"
    if facts.device_s is not None:
        line += f" device_ms={_ms(facts.device_s)} kv_block_s={facts.kv_block_s:.3f}"
    if facts.cost is not None:
        line += f" cost={facts.cost:.9f}"
    if facts.fingerprint:
        line += f" fingerprint={facts.fingerprint}"
    if facts.trace is not None:
        line += f" trace={facts.trace.trace_id}"
    return line


def _json(at: str, facts: RequestFacts) -> str:
    """The same names; None: not known, or there is none."""
    trace = facts.trace
    return _encoded(
        {
            "at": at,
            "id": facts.id,
            "tenant": facts.tenant or None,
            "key": facts.key_id or None,
            "surface": facts.surface,
            "route": facts.route or None,
            "model": facts.model or None,
            **({"version": facts.version} if facts.version else {}),
            "replica": facts.replica or None,
            "outcome": facts.ending,
            "reason": facts.reason or None,
            "prompt": facts.input_tokens,
            "cached": facts.cached_tokens,
            "output": facts.output_tokens,
            "queue_ms": _rounded(facts.queue_s),
            "ttft_ms": _rounded(facts.ttft_s),
            "total_ms": _rounded(facts.total_s),
            "tries": facts.num_tries,
            "rule": facts.rule or None,
            "device_ms": _rounded(facts.device_s),
            "kv_block_s": facts.kv_block_s,
            "cost": facts.cost,
            **({"steps": len(facts.steps)} if facts.steps else {}),
            **({"step_of": facts.step_of} if facts.step_of else {}),
            **({"fingerprint": facts.fingerprint} if facts.fingerprint else {}),
            "trace": trace.trace_id if trace is not None else None,
        }
    )


def _encoded(value: object) -> str:
    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=2)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
