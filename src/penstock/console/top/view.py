"""The fleet as the feed tells it: what is known now, and rates from counts."""

from __future__ import annotations

from msgspec import Struct

from penstock.console.views import State
from penstock.tenancy.model_orders import DeviceMemory, ModelState

Number = float | None


class Hello(Struct):
    """The first message of a feed."""

    kind: str
    version: str
    began_s: float
    at_s: float
    columns: list[str]
    series: dict[str, list[list[Number]]]  # by model, columns of seconds
    state: State
    times: list[float] = []


class Tick(Struct):
    at_s: float
    state: State
    rows: dict[str, list[Number]]  # by model


class AlertLine(Struct):
    """The fields of the admin API's alerts that there is room for."""

    alert: str
    severity: str
    state: str
    summary: str
    since: float = 0.0


class SharedModels(Struct):
    """Models that share a device, and what they hold of it."""

    devices: list[DeviceMemory]
    models: list[ModelState]


class View:
    """The state of everything at one moment."""

    def __init__(self, url: str, hello: Hello) -> None:
        self.url = url
        self.hello = hello
        self.at_s = hello.at_s
        self.state = hello.state
        self.rows = {model: [column[-1] if column else None for column in s] for model, s in hello.series.items()}
        self.alerts: list[AlertLine] | None = None  # None: there is no watch here
        self.shared: SharedModels | None = None  # None: no models share a device here
        self.trouble = ""
        self._row_at_s = hello.times[-1] if hello.times else hello.at_s
        self._period_s = self._row_at_s - hello.times[-2] if len(hello.times) > 1 else 1.0

    def take(self, tick: Tick) -> None:
        self.at_s, self.state, self.rows = tick.at_s, tick.state, tick.rows
        self._period_s, self._row_at_s = tick.at_s - self._row_at_s, tick.at_s

    def number(self, model: str, column: str) -> Number:
        row = self.rows.get(model)
        return row[self.hello.columns.index(column)] if row else None

    def rate(self, model: str, column: str) -> Number:
        """A count per second."""
        count = self.number(model, column)
        return None if count is None else count / max(self._period_s, 1e-3)
