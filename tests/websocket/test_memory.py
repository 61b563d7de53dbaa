from __future__ import annotations

from typing import Any

from penstock.websocket.memory import MAX_SOCKET_BYTES, Conversations, Room


def items(num_bytes: int) -> list[dict[str, Any]]:
    return [{"content": "x" * num_bytes}]


def test_the_oldest_conversations_of_a_socket_go_first() -> None:
    room = Room()
    kept = Conversations(room)
    third = MAX_SOCKET_BYTES // 3
    for number in range(5):
        kept.remember(f"r{number}", [], items(third), [])
    assert [number for number in range(5) if kept.up_to(f"r{number}") is not None] == [3, 4]
    turns = kept.up_to("r4")
    assert turns is not None
    kept.remember("r5", turns, items(10), [])  # it has the turns before it
    assert (kept.up_to("r3"), len(kept.up_to("r5") or [])) == (None, 2)
    kept.remember("large", [], items(MAX_SOCKET_BYTES), [])
    assert kept.up_to("large") is None
    kept.forget_all()
    assert room.held_bytes == 0


def test_what_a_process_has_no_room_for_is_not_remembered() -> None:
    room = Room(1000)
    one, other = Conversations(room), Conversations(room)
    one.remember("a", [], items(600), [])
    other.remember("b", [], items(600), [])
    assert one.up_to("a") is not None
    assert other.up_to("b") is None
    one.forget_all()
    other.remember("b", [], items(600), [])
    assert other.up_to("b") is not None
