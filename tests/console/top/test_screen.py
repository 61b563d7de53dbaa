"""The fleet as text: what is shown, and that eighty columns are enough."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.api.replica_report import TensorNews
from penstock.console.history import COLUMNS
from penstock.console.top import screen
from penstock.console.top.view import AlertLine, Hello, SharedModels, Tick, View
from penstock.console.views import QueueRow, ReplicaRow, State, TenantRow
from penstock.core.ranks import RankFigures
from penstock.tenancy.model_orders import DeviceMemory, ModelMemory, ModelState
from tests.examples import examples

names = st.text(min_size=1, max_size=60, alphabet=st.characters(exclude_categories=["C", "Z", "M", "Lo", "So"]))
numbers = st.none() | st.floats(0, 1e9)


def view(state: State | None = None, **columns: float | None) -> View:
    row = [columns.get(name) for name in COLUMNS]
    state = state or State([], [ReplicaRow("r", "small-1f2a", "small", "penstock", "ready")], [], [])
    series = {"": [[value] for value in row], "small": [[value] for value in row]}
    hello = Hello("gateway", "1.2", began_s=0.0, at_s=7200.0, columns=list(COLUMNS), series=series, state=state)
    return View("http://127.0.0.1:8000", hello)


def lines(shown: View, width: int = 80) -> list[str]:
    return screen.text(shown, width=width).splitlines()


def text(shown: View) -> str:
    return screen.text(shown, width=80)


def coloured(shown: View) -> list[str]:
    """Lines as a terminal gets them."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", no_color=False)
    with console.capture() as captured:
        console.print(screen.screen(shown, 80))
    return captured.get().splitlines()


def test_a_replica_is_shown_with_its_load_and_a_bar_of_its_cache() -> None:
    replica = ReplicaRow(
        "r",
        "small-1f2a",
        "small",
        "penstock",
        "ready",
        running=3,
        waiting=2,
        max_sequences=64,
        kv_used=250,
        kv_capacity=1000,
        tokens_per_s=123.4,
        hit_rate=0.5,
        heard_s_ago=0.12,
    )
    (line,) = [line for line in lines(view(State([], [replica], [], []))) if line.startswith("small-1f2a")]
    assert line.split() == ["small-1f2a", "ready", "3/64", "2", "━━╸", "25%", "123", "50%", "0.1s"]


def test_roles_of_replicas_are_shown_where_they_differ() -> None:
    rows = [ReplicaRow("r", f"a-{role}", "small", "penstock", "ready", role=role) for role in ("prefill", "decode")]
    shown = lines(view(State([], rows, [], [])), 100)
    assert [line.split()[-2] for line in shown if line.startswith(("REPLICA", "a-"))] == ["ROLE", "prefill", "decode"]
    alone = ReplicaRow("r", "a", "small", "penstock", "ready")
    assert not any("ROLE" in line for line in lines(view(State([], [alone], [], [])), 100))


def test_ranks_of_a_replica_are_shown_with_their_memory_and_shares() -> None:
    ranks = (RankFigures(0, "", "GPU-1", 3 << 30, 0.61, 0.125, True), RankFigures(1, "node 1", "", 1 << 29, None, None))
    spread = ReplicaRow("r", "small-1f2a", "small", "penstock", "ready", parallelism="TP2", ranks=ranks)
    shown = lines(view(State([], [spread], [], [])))
    first, second = (line.split() for line in shown if re.match(r"small-1f2a [01] ", line))
    assert first == ["small-1f2a", "0", "3.0", "GiB", "61%", "~12%", "-"]
    assert second == ["small-1f2a", "1", "0.5", "GiB", "-", "-", "node", "1"]
    assert any(line.startswith(" ~ estimated") for line in shown)
    alone = ReplicaRow("r", "small-1f2a", "small", "penstock", "ready")
    assert not any(line.startswith("RANK") for line in lines(view(State([], [alone], [], []))))


def test_versions_of_a_model_that_takes_tensors_are_shown_with_their_batchers() -> None:
    versions = (
        TensorNews("sorter", 1, 2, "cpu", 16, waiting=3, running=4, rows=90, batches=20),
        TensorNews("sorter", 2),
    )
    shown = lines(
        view(State([], [ReplicaRow("r", "sorter-1f2a", "sorter", "penstock", "ready", tensors=versions)], [], []))
    )
    first, second = (line.split() for line in shown if re.match(r"sorter-1f2a v[12] ", line))
    assert first == ["sorter-1f2a", "v1", "4", "3", "90", "4.5", "of", "16", "2", "cpu"]
    assert second == ["sorter-1f2a", "v2", "0", "0", "0", "-", "of", "1", "1", "cpu"]


def test_times_and_rates_of_a_model_are_shown_and_what_nobody_knows_is_a_dash() -> None:
    known = view(ok=1.25, output_tokens=12345, ttft_p50=0.0451, ttft_p95=12.0, tpot_p50=0.0012, waiting=3, running=4)
    (line,) = [line for line in lines(known) if line.startswith("small ")]
    assert line.split() == ["small", "1.2", "12.3k", "45", "ms", "12.0", "s", "1.2", "ms", "-", "3", "4"]


def test_a_count_is_shown_per_second_of_the_time_that_passed() -> None:
    shown = view(ok=1)
    row: list[float | None] = [6 if name == "ok" else None for name in COLUMNS]
    shown.take(Tick(7203.0, State([], [], [], []), {"": row, "small": row}))
    assert "2.0 ok/s" in text(shown)


def test_a_tick_takes_the_place_of_what_was_known() -> None:
    shown = view(ok=1.0)
    row: list[float | None] = [2.0 if name == "ok" else None for name in COLUMNS]
    shown.take(Tick(7201.0, State([], [], [], []), {"": row, "small": row}))
    assert "2.0 ok/s" in text(shown)
    assert "0/0 healthy" in text(shown)


def test_pages_come_before_tickets_and_what_is_over_is_not_shown() -> None:
    shown = view()
    assert "alerts" not in text(shown)  # nobody watches
    shown.alerts = []
    assert "no alerts" in text(shown)
    shown.alerts = [
        AlertLine("a", "ticket", "firing", "a queue is long", 7140.0),
        AlertLine("b", "page", "firing", "a replica is gone", 7140.0),
        AlertLine("c", "page", "resolved", "it was slow"),
    ]
    said = text(shown)
    assert said.index("a replica is gone") < said.index("a queue is long")
    assert "it was slow" not in said
    assert "ALERTS 2" in said


def test_queues_and_the_tenants_that_use_most_are_shown() -> None:
    tenants = [TenantRow(f"t{number}", requests=number, today_tokens=number) for number in range(8)]
    queues = [QueueRow("small", {"interactive": 3, "batch": 0}, {"interactive": 256, "batch": 1024})]
    said = text(view(State([], [], queues, tenants)))
    assert "3/256" in said
    assert "t7 " in said
    assert "t0 " not in said
    assert "and 3 more" in said


def test_a_wide_terminal_shows_more_columns_and_whole_names() -> None:
    name = "a-model-with-a-long-name-of-forty-letters"
    replica = ReplicaRow("http://10.0.0.1:8000", name, "small", "penstock", "ready", restarts=3, version="1.2")
    narrow, wide = (lines(view(State([], [replica], [], [])), width=width) for width in (80, 200))
    assert "…" in " ".join(narrow)
    (line,) = [line for line in wide if line.startswith(name)]
    assert {"http://10.0.0.1:8000", "small", "3"} <= set(line.split())
    assert max(map(len, narrow)) <= 80


def test_a_replica_that_is_out_is_grey() -> None:
    replica = ReplicaRow("r", "small-1f2a", "small", "penstock", "out")
    (line,) = [line for line in coloured(view(State([], [replica], [], []))) if "small-1f2a" in line]
    assert line.startswith("\x1b[2m")


def test_colours_are_for_terminals_only() -> None:
    assert "\x1b" not in text(view())
    assert "\x1b" in "\n".join(coloured(view()))


def test_names_are_no_markup() -> None:
    replica = ReplicaRow("r", "[red]small[/red]", "small", "penstock", "ready")
    assert "[red]small[/red]" in text(view(State([], [replica], [], [])))


@settings(max_examples=examples(25))
@given(names, st.integers(0, 10**9), st.dictionaries(st.sampled_from(COLUMNS), numbers), st.integers(20, 200))
def test_no_line_is_wider_than_the_terminal(name: str, count: int, columns: dict[str, float], width: int) -> None:
    replica = ReplicaRow(
        name,
        name,
        name,
        "penstock",
        "restarting",
        breaker="open",
        running=count,
        waiting=count,
        max_sequences=count,
        kv_used=count,
        kv_capacity=count,
        tokens_per_s=float(count),
        hit_rate=1.0,
        heard_s_ago=float(count),
    )
    state = State([], [replica], [QueueRow(name, {name: count}, {name: count})], [TenantRow(name, requests=count)])
    shown = view(state, **columns)
    shown.alerts = [AlertLine("a", "page", "firing", name * 5, 1.0)]
    assert max(map(len, lines(shown, width=width))) <= max(80, width)


def test_what_a_feed_says_first_can_be_read() -> None:
    said = msgspec.json.encode(view(ok=1.0).hello)
    assert msgspec.json.decode(said, type=Hello).state.replicas[0].name == "small-1f2a"


def test_models_that_share_a_device_have_their_memory_and_state() -> None:
    memory = ModelMemory(fixed_bytes=3 << 30, floor_bytes=1 << 29, kv_bytes=1 << 30, held_bytes=4 << 30)
    blank: dict[str, Any] = {"order": "", "reason": "", "refusal": "", "no_room": "", "failure": "", "failed_loads": 0}
    blank |= {"in_flight": 0, "loads": 1, "unloads": 0, "loaded_at": None, "stays_until": None, "used_at": None}
    chat = ModelState(
        name="chat", state="loaded", pinned=True, eta_s=None, waiting=0, device="H", memory=memory, **blank
    )
    away = msgspec.structs.replace(chat, name="code", state="loading", pinned=False, eta_s=12.0, waiting=3)
    shown = view()
    assert "ON THE DEVICE" not in text(shown)
    shown.shared = SharedModels([DeviceMemory("H200", 20 << 30, 8 << 30, 12 << 30, 30.0)], [chat, away])
    assert "H200: 8.00 GiB of 20.00 GiB held by models" in text(shown)
    (chat_line,) = (line for line in lines(shown) if line.startswith("chat"))
    assert chat_line.split() == ["chat", "loaded", "yes", "4.00", "GiB", "1.00", "GiB", "0"]
    (away_line,) = (line for line in lines(shown) if line.startswith("code"))
    assert away_line.split()[:3] == ["code", "loading", "12s"]
