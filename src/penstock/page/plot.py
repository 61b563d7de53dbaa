"""Plots as SVG text: lines, dots and limits on two axes, in the colours of the page they stand in. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 14, 44
MAX_DOTS = 2000
TINY = 1e-9  # of any axis: what is smaller is nothing
COLOURS = 6  # that the page defines as --c0 to --c5


@dataclass(frozen=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    titles: Sequence[str] = ()  # of its dots, shown by a pointer that rests on them
    is_dots: bool = False  # dots alone
    colour: int | None = None  # None: the next


@dataclass(frozen=True)
class Limit:
    """A straight line across: an SLO, a load that was found."""

    name: str
    at: float
    is_upright: bool = False


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    limits: Sequence[Limit] = field(default_factory=list)
    is_log_x: bool = False
    is_log_y: bool = False


class _Axis:
    def __init__(self, values: Sequence[float], start: float, end: float, *, is_log: bool) -> None:
        self.is_log = is_log
        self.start, self.end = start, end
        if is_log:
            positive = [value for value in values if value > TINY] or [1.0]
            self.low = max(mark for mark in _marks(min(positive)) if mark <= min(positive) * 1.001)
            self.high = min(mark for mark in _marks(max(positive)) if mark >= max(positive) * 0.999)
            self.high = max(self.high, 2 * self.low)
        else:
            most = max(max(values, default=1.0), TINY)
            step = _step(most)
            self.low, self.high = 0.0, step * math.ceil(most / step - 1e-9)

    def place(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.low)
            share = math.log10(value / self.low) / math.log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if self.high / self.low <= 1000 else (1,)
            marks = [factor * 10.0**power for power in powers for factor in factors]
            return [mark for mark in marks if self.low * 0.999 <= mark <= self.high * 1.001]
        step = _step(self.high)
        return [step * number for number in range(round(self.high / step) + 1)]


def svg(plot: Plot) -> str:
    xs = [x for line in plot.lines for x in line.xs] + [limit.at for limit in plot.limits if limit.is_upright]
    ys = [y for line in plot.lines for y in line.ys] + [limit.at for limit in plot.limits if not limit.is_upright]
    x_axis = _Axis(xs, LEFT, WIDTH - RIGHT, is_log=plot.is_log_x)
    y_axis = _Axis(ys, HEIGHT - BOTTOM, TOP, is_log=plot.is_log_y)
    parts = [_grid(plot, x_axis, y_axis)]
    legend = []
    for index, line in enumerate(plot.lines):
        colour = f"var(--c{(index if line.colour is None else line.colour) % COLOURS})"
        parts.append(_drawn(line, x_axis, y_axis, colour))
        legend.append(f'<span><i style="background:{colour}"></i>{escape(line.name)}</span>')
    for index, limit in enumerate(plot.limits):
        parts.append(_limit(limit, x_axis, y_axis, 14 * index))
    body = "".join(parts)
    return (
        f'<figure><figcaption>{escape(plot.title)}</figcaption><div class="legend">{"".join(legend)}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">{body}</svg></figure>'
    )


def _grid(plot: Plot, x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        parts.append(
            f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{_tick(tick)}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="label" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(plot.x_label)}</text>'
    )
    parts.append(
        f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 {middle_y})">'
        f"{escape(plot.y_label)}</text>"
    )
    return "".join(parts)


def _drawn(line: Line, x_axis: _Axis, y_axis: _Axis, colour: str) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(line.xs, line.ys, strict=True)]
    parts = []
    if not line.is_dots:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" style="stroke:{colour}"/>')
    if line.is_dots or line.titles:
        stride = max(1, math.ceil(len(places) / MAX_DOTS))
        for index in range(0, len(places), stride):
            x, y = places[index]
            title = f"<title>{escape(line.titles[index])}</title>" if line.titles else ""
            radius, opacity = (2 if len(places) > 200 else 3, 0.6) if line.is_dots else (3.5, 1)
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill:{colour};opacity:{opacity}">'
                f"{title}</circle>"
            )
    return "".join(parts)


def _limit(limit: Limit, x_axis: _Axis, y_axis: _Axis, down: int) -> str:
    if limit.is_upright:
        x = x_axis.place(limit.at)
        anchor, dx = ("end", -5) if x > (LEFT + WIDTH) / 2 else ("start", 5)
        return (
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="limit" x="{x + dx:.1f}" y="{TOP + 12 + down}" text-anchor="{anchor}">'
            f"{escape(limit.name)}</text>"
        )
    y = y_axis.place(limit.at)
    return (
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="limit" x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">{escape(limit.name)}</text>'
    )


def _marks(value: float) -> list[float]:
    """Returns the marks of a logarithmic axis around a value."""
    power = 10.0 ** math.floor(math.log10(value))
    return [power * factor for factor in (0.5, 1, 2, 5, 10, 20)]


def _step(high: float) -> float:
    """Returns the step of about five ticks: 1, 2 or 5 times a power of ten."""
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}" if value == 0 or value >= 0.001 else f"{value:.0e}"
