"""Rows of the console, made of what the gateway knows."""

from penstock.console.views import decision_row
from penstock.router.legs import Alone, Source, SourceReason
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from tests.snapshots import snapshot


def test_a_decision_shows_its_second_leg_or_why_there_is_none() -> None:
    request, names = EdgeRequest("q", "m", 900, 50), {"p": "m-1", "d": "m-2"}
    picked, other = snapshot(id="d", models=("m",)), snapshot(id="p", models=("m",))
    source = Source(other, SourceReason.PREFIX, 800, 0, 1, 0.5, 0.25)
    row = decision_row(1.0, request, Choice(picked, [picked], {}, [1.0], source=source), names)
    assert (row.picked, row.source, row.why, row.pulled_tokens, row.gain_s) == ("m-2", "m-1", "prefix", 800, 0.25)
    row = decision_row(1.0, request, Choice(picked, [picked], {}, [1.0], alone=Alone.NO_GAIN), names)
    assert (row.source, row.why, row.gain_s) == ("", "no_gain", None)
    row = decision_row(1.0, request, Choice(picked, [picked], {}, [1.0]), names)
    assert (row.source, row.why) == ("", "")
