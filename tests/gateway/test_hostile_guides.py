"""Guides of one tenant that fail, through a gateway: they are the tenant's own failures, and nobody else feels them."""

from __future__ import annotations

import openai
import pytest

from tests.gateway.running import running_gateway
from tests.server.replica import NAME, serving
from tests.waiting import eventually

FAILING = [
    {"guided_regex": "\\"},
    {"guided_regex": "(?:a?){500}a{500}"},
    {"guided_grammar": "start:"},
    {"guided_grammar": 'start: "a"{100000}'},
    {"guided_json": {"type": "array", "items": {"$ref": "#"}, "minItems": 3}},
]
LATE = {"guided_grammar": 'start: /[a-z]{8}/ "x"{100000}'}  # after a few tokens


@pytest.mark.slow
def test_one_tenants_failing_guides_take_no_replica_from_another() -> None:
    with serving(is_guided=True) as replica, running_gateway(replica) as gateway:
        hostile, other = (gateway.client(gateway.add_tenant(name)).completions for name in ("hostile", "other"))
        for guide in [*FAILING * 3, *[LATE] * 10]:
            with pytest.raises(openai.BadRequestError):
                hostile.create(model=NAME, prompt="It is", seed=1, max_tokens=60, extra_body=guide)
        for _ in range(10):
            stream = hostile.create(model=NAME, prompt="It is", seed=1, max_tokens=60, stream=True, extra_body=LATE)
            with pytest.raises(openai.APIError, match="could not be kept to its guide") as caught:
                list(stream)
            assert caught.value.type == "invalid_request_error"
        for _ in range(10):
            answer = other.create(model=NAME, prompt="It is", extra_body={"guided_choice": ["yes"]})
            assert answer.choices[0].text == "yes"
        assert gateway.states() == ["ready"]
        eventually(gateway.is_idle)
