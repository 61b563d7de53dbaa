"""Arguments of the engine's process, which everybody on the machine can read."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.cli.serve import for_engine
from penstock.core.settings import EngineSettings, ServerSettings, Settings

SETTINGS = Settings(
    model="smollm2", server=ServerSettings(gateway_secret="hush", lora={"poet": "/adapters/of/somebody"})
)


def test_adapters_that_are_named_have_room_on_a_gpu_where_there_is_none_by_default() -> None:
    assert for_engine(SETTINGS).engine.max_loras == 8
    asked = replace(SETTINGS, engine=EngineSettings(max_loras=0))
    assert for_engine(asked).engine.max_loras == 0
    assert for_engine(replace(SETTINGS, server=ServerSettings())).engine.max_loras is None


def test_no_secret_and_nothing_of_the_servers_is_among_them() -> None:
    told = for_engine(SETTINGS)
    assert told.server == ServerSettings()
    assert not any(word in msgspec.json.encode(told) for word in (b"hush", b"somebody", b"poet"))
