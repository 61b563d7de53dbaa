"""What a client may tell the gateway besides its request: how long it expects the answer to be. Nobody else is told."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import InvalidRequest

EXPECTED_OUTPUT = b"x-penstock-expected-output"
_MOST_DIGITS = 9


def expected_output(headers: Mapping[bytes, bytes]) -> int | None:
    """Tokens of one answer; None: it does not say."""
    said = headers.get(EXPECTED_OUTPUT)
    if said is None:
        return None
    said = said.strip()
    if not said.isdigit() or len(said) > _MOST_DIGITS or not int(said):
        name = EXPECTED_OUTPUT.decode()
        raise InvalidRequest(f"{name}: expected a number of tokens, 1 or more", param=name)
    return int(said)
