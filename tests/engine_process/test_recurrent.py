"""What a model with a recurrent state cannot do is refused by the setting's name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.capacity.shapes import SHAPES
from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.engine_process.recurrent import check_stages, for_recurrent
from penstock.model.stages import stage_layers

HYBRID, PLAIN = SHAPES["qwen3-next-80b-a3b"], SHAPES["qwen3-8b"]


@pytest.mark.parametrize(
    ("settings", "param", "words"),
    [
        (EngineSettings(speculate="ngram"), "speculate", "speculative decoding"),
        (EngineSettings(draft="small"), "draft", "speculative decoding"),
        (EngineSettings(host_kv_gib=1), "host_kv_gib", "host memory"),
        (EngineSettings(disk_kv_gib=1), "disk_kv_gib", "on disk"),
        (EngineSettings(kv_port=0), "kv_port", "KV transfer"),
        (EngineSettings(tp=2, sp=2), "sp", "sequence parallelism"),
    ],
)
def test_what_a_state_rules_out_is_refused_by_name(settings: EngineSettings, param: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"recurrent state, which rules out .*{words}") as refused:
        for_recurrent(settings, HYBRID)
    assert refused.value.param == param
    assert for_recurrent(settings, PLAIN) is settings


def test_drafts_are_off_unless_asked_for() -> None:
    assert for_recurrent(EngineSettings(), HYBRID).speculate == "off"


def test_a_model_with_a_state_drafts_for_nobody() -> None:
    with pytest.raises(ConfigError, match="cannot draft"):
        for_recurrent(EngineSettings(draft="small"), PLAIN, HYBRID)


def test_a_stage_of_linear_layers_alone_is_refused() -> None:
    check_stages(HYBRID, stage_layers(HYBRID, 4))
    assert HYBRID.linear is not None
    shallow = replace(HYBRID, num_layers=4, linear=replace(HYBRID.linear, layers=(0, 1, 2)))
    with pytest.raises(ConfigError, match="stage 0 of 4 would have linear layers alone") as refused:
        check_stages(shallow, stage_layers(shallow, 4))
    assert refused.value.param == "pp"
