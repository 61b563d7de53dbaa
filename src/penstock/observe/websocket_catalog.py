"""Metrics of WebSockets, of a replica and of a gateway alike."""

from __future__ import annotations

from penstock.observe.catalog import Metric

OPEN = Metric("penstock_websockets_open", "gauge", "WebSockets that are open now.")
MESSAGES = Metric(
    "penstock_websocket_messages_total",
    "counter",
    "Messages on WebSockets, received and sent. Their requests count as those of HTTP do.",
    ("direction",),
)
CLOSED = Metric(
    "penstock_websockets_closed_total",
    "counter",
    "WebSockets that were closed, by code: of either side's close frame, 1006 where there was none.",
    ("code",),
)
REFUSED = Metric(
    "penstock_websockets_refused_total", "counter", "Handshakes that were refused, by the error's code.", ("code",)
)

WEBSOCKET_CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
