"""The bill of a request that another process may have to make again: one, under a name that all of them give it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.tenancy.usage import Recorder, Usage


def whole(usages: Sequence[Usage], name: str) -> Usage | None:
    """All parts as one; None: there are none."""
    if not usages:
        return None
    return replace(
        usages[-1],
        request_id=name,
        input_tokens=sum(one.input_tokens for one in usages),
        cached_tokens=sum(one.cached_tokens for one in usages),
        output_tokens=sum(one.output_tokens for one in usages),
        cost_nanos=sum(one.cost_nanos for one in usages),
        device_us=sum(one.device_us for one in usages),
        kv_block_ms=sum(one.kv_block_ms for one in usages),
        requests=1,
    )


class WholeBill:
    """Hands usage on when all of it is known. The ledger counts one name once, whoever reports it again."""

    def __init__(self, ledger: Recorder, name: str) -> None:
        self._ledger = ledger
        self._name = name
        self._usages: list[Usage] = []
        self._is_void = False

    def void(self) -> None:
        """Another process makes it from its beginning, and reports all of it."""
        self._is_void = True

    def record(self, usage: Usage) -> None:
        self._usages.append(usage)
        if usage.requests and not self._is_void and (bill := whole(self._usages, self._name)) is not None:
            self._ledger.record(bill)
