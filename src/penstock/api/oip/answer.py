"""Answers of /v1/completions, read as what the Open Inference Protocol tells of them: texts, ends and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from penstock.api.errors import error_headers, http_error, plain_error_body
from penstock.core.errors import EngineFailed, PenstockError

_MAX_EVENT_BYTES = 16 << 20


class Generated(NamedTuple):
    """More of the text of each prompt, and why it ended if it did."""

    texts: list[str]
    ends: list[str]  # empty: it goes on
    is_last: bool = True


class Refusal(Exception):
    """An error as the application answered it: with its status, and no class of ours any more."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        param: str | None = None,
        reason: str | None = None,
        retry_after_s: int | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.request_id = request_id

    @classmethod
    def of(cls, error: PenstockError) -> Refusal:
        told = dict(error_headers(error)).get(b"retry-after")
        retry_after_s = None if told is None else int(told)
        return cls(http_error(error).status, error.message, error.code, error.param, error.reason, retry_after_s)

    def body(self) -> bytes:
        return plain_error_body(self.message, self.code, self.param, self.reason)


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    index: int = 0


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    param: str | None = None
    reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    error: _Error | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


_completion = msgspec.json.Decoder(_Completion)
_error_body = msgspec.json.Decoder(_ErrorBody)


def read_refusal(status: int, headers: Mapping[bytes, bytes], body: bytes) -> Refusal:
    """`headers` by lower-case name. A body that cannot be read leaves the status."""
    try:
        error = _error_body.decode(body).error or _Error()
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = _Error()
    wait, request_id = headers.get(b"retry-after", b""), headers.get(b"x-request-id", b"").decode("latin-1")
    return Refusal(
        status,
        error.message or f"refused with status {status}",
        str(error.code or ""),
        error.param,
        error.reason,
        int(wait) if wait.isdigit() else None,
        request_id,
    )


def read_whole(body: bytes, num_texts: int) -> Generated:
    """A whole completion, one choice for each text. Raises EngineFailed for one that cannot be read."""
    try:
        choices = _completion.decode(body).choices
    except (msgspec.DecodeError, UnicodeDecodeError):
        choices = []
    found = {choice.index: choice for choice in choices}
    if set(found) != set(range(num_texts)):
        raise EngineFailed("the replica's answer is not a completion of each text")
    ordered = [found[index] for index in range(num_texts)]
    return Generated([one.text or "" for one in ordered], [one.finish_reason or "" for one in ordered])


class CompletionReader:
    """A streamed completion of one text, as its bytes come."""

    def __init__(self) -> None:
        self._rest = b""
        self._end = ""  # why it ended, which is told with the last of it
        self.is_done = False

    def read(self, data: bytes) -> str:
        """The text that is new. Raises Refusal for an error that is told, EngineFailed for what makes no sense."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EngineFailed("an event of the replica's answer has no end")
        return "".join([self._read_line(line.rstrip(b"\r")) for line in lines])

    def end(self) -> str:
        """Reason why the text ended, once the stream has. Raises EngineFailed where it broke off."""
        if not (self.is_done or self._end):
            raise EngineFailed("the answer broke off")
        return self._end

    def _read_line(self, line: bytes) -> str:
        """Each event is a line of data; other lines name it, or are comments."""
        if not line.startswith(b"data:"):
            return ""
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self.is_done = True
            return ""
        try:
            found = _completion.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise EngineFailed("an event of the replica's answer is not a completion") from None
        if found.error is not None:
            error = found.error
            raise Refusal(
                500, error.message or "the answer broke off", str(error.code or ""), error.param, error.reason
            )
        text = ""
        for choice in found.choices:
            text += choice.text or ""
            self._end = choice.finish_reason or self._end
        return text
