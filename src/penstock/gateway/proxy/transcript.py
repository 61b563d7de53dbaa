"""A gateway's notes of one answer as it passes: of a penstock replica's the token ids, so that another can carry it
on, also if the client gets it as a whole; of any other stream a count of its events; and at the end what was used."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.api.relay import COST_HEADER, StreamRecord, is_whole, read_cost, sealed
from penstock.core.request import Cost
from penstock.dialects.usage import StreamTally
from penstock.gateway.records.token_usage import TokenUsage, find_usage
from penstock.gateway.replicas.replica import ENVELOPE_HEADER, STREAM_HEADER, WHOLE_HEADER, Replica
from penstock.gateway.tokens.request_size import Size
from penstock.http.forward import IsWhole, Outcome, Tap
from penstock.http.message import ResponseHead

_COST_HEADER = COST_HEADER.encode()
_MAX_BYTES = 1 << 20  # of a request and its ids; a replica may refuse what is longer than a request should be


class Transcript(msgspec.Struct, eq=False):
    """Transcript of an answer that begins, at whichever replica; `carried_on` by others, it is still the same."""

    _body: bytes  # as replicas are sent it
    _size: Size
    is_stream: bool
    record: StreamRecord | None = None  # of a stream that another replica could carry on
    _tally: StreamTally | None = None  # of one that none could
    _cost: Cost | None = None  # of an answer that is no stream
    tap: Tap | None = None  # for the bytes that are passed on
    is_whole: IsWhole | None = None  # for a stream's end

    def letter(self, replica: Replica) -> tuple[bytes, bytes]:
        """Headers and body of the request, from its beginning. A replica that would get the same ids is sent them."""
        self.record = self._tally = self.tap = self.is_whole = None
        if self.is_stream:
            if replica.relays:
                self.record = StreamRecord()
                self.tap, self.is_whole = self.record.append, is_whole
            else:
                self._tally = StreamTally()
                self.tap = self._tally.append
        elif replica.relays:
            self.tap, self.is_whole = self._append, is_whole
        asks = b"" if self.is_stream or not replica.relays else WHOLE_HEADER
        if replica.relays:
            ids = self._size.ids_for(replica.text)
            if ids and len(ids) + len(self._body) <= _MAX_BYTES:
                return ENVELOPE_HEADER + asks, sealed(self._body, ids)
        return STREAM_HEADER if self.record is not None else asks, self._body

    def rest_letter(self, replica: Replica) -> tuple[bytes, bytes] | None:
        """The same for what the client has not seen yet; None: nobody can know what that is."""
        if self.record is None:
            return None
        envelope = self.record.envelope(self._body, self._size.ids_for(replica.text) or b"null")
        if envelope is None:
            return None
        return ENVELOPE_HEADER + (b"" if self.is_stream else WHOLE_HEADER), envelope

    def answered(self, head: ResponseHead) -> None:
        """An answer begins that will be passed on."""
        cost = head.headers.get(_COST_HEADER)
        self._cost = read_cost(cost) if cost is not None else None
        has_events = head.headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if has_events and not self.is_stream and self.record is None and self.tap is not None:
            self.record = StreamRecord()

    def _append(self, blocks: bytes) -> None:
        if self.record is not None:
            self.record.append(blocks)

    @property
    def num_tokens(self) -> int:
        """Made for the client so far, as far as it is known here."""
        if self.record is not None:
            return self.record.num_tokens
        return self._tally.output_tokens if self._tally is not None else 0

    def usage(self, outcome: Outcome | None) -> TokenUsage | None:
        """Usage by what the answer says at its end, or the ids that came; None: not known, or there was no answer."""
        if outcome is not None and outcome.status != 200:
            return None
        found = find_usage(outcome.tail) if outcome is not None else None
        record = self.record
        if (
            found is not None and not found.input_tokens
        ):  # in Anthropic's streams that may be said at the beginning only
            first = find_usage(self._tally.head) if self._tally is not None else None
            prompt_tokens = first.input_tokens if first is not None else 0
            found = replace(found, input_tokens=prompt_tokens or self._size.most_used[0])
        if found is None and record is not None and (prompt := record.prompt_tokens) is not None:
            found = TokenUsage(prompt, *record.counts)
        if found is None:
            return None
        self._size.learn(found.input_tokens)
        work = self._cost if record is None else record.cost
        return found if work is None else replace(found, work=work)

    def guess(self) -> TokenUsage:
        """Charge for an answer whose client left before its usage came: the events that passed, or all it might get."""
        prompt, output = self._size.most_used
        return TokenUsage(prompt, output) if self._tally is None else TokenUsage(prompt, self._tally.output_tokens)

    def guess_whole(self) -> TokenUsage:
        """Charge for a whole answer without a usage: as many tokens as events were counted, else what was reserved."""
        prompt, output = self._size.most_used
        return TokenUsage(prompt, self._tally.output_tokens or output if self._tally is not None else output)

    def guess_part(self) -> TokenUsage | None:
        """Charge for a stream that broke off where none can carry it on; None: the client got nothing of use."""
        return self.guess() if self._tally is not None and self._tally.output_tokens else None
