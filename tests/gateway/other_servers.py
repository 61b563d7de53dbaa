"""A gateway in front of one server that is not penstock's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from penstock.gateway.settings.gateway import ModelSettings
from tests.dialects.servers import FakeServer, Reply
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually


class FakeOpenai(FakeServer):
    """A provider of which nothing but OpenAI's paths is known."""

    dialect = "openai"

    def documents(self) -> dict[str, Reply]:
        return {"/v1/models": self.models(owned_by="somebody")}


@contextlib.contextmanager
def in_front_of(server: FakeServer, **options: Any) -> Iterator[RunningGateway]:
    pools = {"m": ModelSettings(replicas=[server.url], **options)}
    with running_gateway(pools=pools, waits=False) as gateway:
        eventually(gateway.states, lambda states: set(states) <= {"ready", "degraded"})
        yield gateway
