"""Settings of the disk below the host's KV blocks."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.engine_process.disk import check_disk


def test_settings_that_keep_nothing_are_refused_by_name() -> None:
    check_disk(EngineSettings())
    check_disk(EngineSettings(disk_kv_gib=1, host_kv_gib=1))
    for settings, ranks, words in (
        (EngineSettings(disk_kv_gib=1), 1, "host_kv_gib"),
        (EngineSettings(disk_kv_gib=1, host_kv_gib=1, prefix_cache=False), 1, "prefix_cache"),
        (EngineSettings(disk_kv_gib=1, host_kv_gib=1), 2, "one rank"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            check_disk(settings, ranks)
        assert refused.value.param == "disk_kv_gib"
