from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from penstock.cli.flags import SECTIONS, TOPICS, add_settings, settings_from
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.core.settings import Settings


def parse(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return settings_from(parser.parse_args(words))


def test_without_flags_everything_is_the_default() -> None:
    assert parse() == Settings()


def test_a_flag_sets_the_setting_of_its_name() -> None:
    settings = parse("model.gguf", "--dtype", "float32", "--port", "0", "--no-prefix-cache", "--tpot", "0.5")
    assert settings.model == "model.gguf"
    assert settings.engine.dtype == "float32"
    assert settings.server.port == 0
    assert settings.engine.prefix_cache is False
    assert settings.slo.tpot_s == 0.5


def test_auto_and_none_can_be_said() -> None:
    settings = parse("--max-num-seqs", "auto", "--tpot", "none")
    assert settings.engine.max_num_seqs is None
    assert settings.slo.tpot_s is None


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text("model: a.gguf\nengine: {dtype: bfloat16, block_size: 32}\nserver:\n")
    settings = parse("--config", str(path), "--dtype", "float32", "--port", "7")
    assert (settings.model, settings.engine.dtype, settings.engine.block_size) == ("a.gguf", "float32", 32)
    assert settings.server.port == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engin: {}", "did you mean 'engine'"),
        ("engine: {blocksize: 4}", "did you mean 'engine.block_size'"),
        ("engine: {block_size: many}", "engine.block_size"),
        ("engine: {block_size: 0}", "engine.block_size"),
        ("engine: 5", "penstock.yaml:1: setting 'engine'"),
        ("- a list", "a list"),
        ("{", "penstock.yaml:1:2: this is not YAML"),
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(path), "--dtype", "float32")


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no-such-file"):
        parse("--config", "no-such-file")


def test_pairs_are_given_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--lora", "poet=/a/poet", "--lora", "bard=x=y").server.lora == {"poet": "/a/poet", "bard": "x=y"}
    for wrong in ("poet", "poet=", "=path"):
        with pytest.raises(SystemExit):
            parse("--lora", wrong)
        assert "expected NAME=VALUE" in capsys.readouterr().err


def test_every_setting_is_in_the_help_of_one_topic() -> None:
    shown = [name for names in TOPICS.values() for name in names]
    fields = {
        f"{section}.{field.name}"
        for section in SECTIONS
        for field in dataclasses.fields(get_type_hints(Settings)[section])
    }
    assert sorted(shown) == sorted(fields)


def test_replicas_over_several_nodes_are_started_one_by_one() -> None:
    with pytest.raises(SystemExit, match="start those over several nodes one by one"):
        main(["serve", "--replicas", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.7"])
