"""Everything that is kept on one request, from its toll to its last line in the log; closed once, whatever the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.admission.admission import Used
from penstock.api.relay import StreamRecord
from penstock.gateway.proxy.rate_limit import Toll
from penstock.gateway.proxy.routed_request import Inquiry
from penstock.gateway.records.bill import Bill
from penstock.gateway.records.recorder import Ending
from penstock.gateway.records.timeline import Course
from penstock.gateway.records.token_usage import TokenUsage
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice

if TYPE_CHECKING:
    from penstock.gateway.app import Door


class Account:
    __slots__ = ("_bill", "_door", "_inquiry", "_toll", "course")

    def __init__(self, door: Door, inquiry: Inquiry, toll: Toll | None) -> None:
        """`toll`: of a tenant with limits."""
        self._door = door
        self._inquiry = inquiry
        self._toll = toll
        self._bill = Bill(door.books.ledger, door.prices, inquiry, door.clock)
        now = door.now()
        self.course = Course(now, door.recorder.traces.begin(inquiry.exchange.request.headers, now))

    def chose(self, request: EdgeRequest, choice: Choice) -> None:
        """A replica, for the request that is sent there now."""
        now = self._door.now()
        self.course.chose(choice, now)
        self._door.recorder.chose(self._inquiry, request, choice, now)

    def follow(self, record: StreamRecord, request: EdgeRequest) -> None:
        """A stream begins, which is charged as it goes."""
        progress = self._toll.progress if self._toll is not None else None
        self._bill.follow(record, request.model, progress, request.adapter)

    def start_over(self, request_id: str, prompt_tokens: int) -> None:
        """The request leaves this model for another. What it has reserved stays."""
        self._door.finished(request_id, Used(prompt_tokens, 0))
        self._bill.stop()
        self.course.starts_over()

    def close(self, request: EdgeRequest, usage: TokenUsage | None, ending: Ending, reason: str) -> None:
        """`usage`: None if nobody worked for it."""
        door, inquiry, model = self._door, self._inquiry, request.model
        if usage is not None:
            usage = self._measured(model, usage, ending)
            self._bill.close(model, usage, request.adapter)
            if inquiry.surface.generates:
                door.lengths.learn(request.tenant, model, usage.output_tokens)
        else:
            self._bill.stop()
        if self._toll is not None:
            self._toll.settle(usage.total if usage is not None else None)
        door.finished(request.id, Used(usage.input_tokens, usage.output_tokens) if usage is not None else None)
        door.recorder.asked(inquiry)
        cost = self._bill.cost(model) if usage is not None else None
        door.recorder.ended(self.course.facts(inquiry, model, usage, ending, reason, door.now(), cost))
        if inquiry.ruling is not None:
            door.recorder.rules.ended(inquiry.ruling, model, usage, door.prices, door.device_time)

    def _measured(self, model: str, usage: TokenUsage, ending: Ending) -> TokenUsage:
        """A replica says at an answer's end what it took; of a client that left before, it is estimated."""
        if usage.work is not None:
            self._door.device_time.learn(model, usage, usage.work)
        elif ending is Ending.CLIENT_GONE:
            return usage._replace(work=self._door.device_time.estimate(model, usage))
        return usage
