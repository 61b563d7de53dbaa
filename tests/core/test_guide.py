import json

import msgspec

from penstock.core.guide import Guide
from penstock.core.request import Request


def test_a_request_without_a_guide_says_nothing_of_one_on_the_wire() -> None:
    plain = Request("a", [1], 4)
    guided = Request("a", [1], 4, guide=Guide("regex", "a"))
    assert b"guide" not in msgspec.msgpack.encode(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(guided), type=Request) == guided


def test_any_object_is_a_schema_and_a_choice_is_a_grammar() -> None:
    assert json.loads(Guide.json_object().source)["type"] == "object"
    assert Guide.choice(["a", 'b"c']).source == 'start: "a" | "b\\"c"'
