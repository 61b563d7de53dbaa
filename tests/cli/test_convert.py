import json
from pathlib import Path

import pytest

from tests.cli.real_server import MODEL
from tests.cli.test_main import penstock

pytestmark = pytest.mark.slow


def test_pull_prints_where_the_model_is_and_twice_is_once() -> None:
    paths = [penstock("pull", MODEL).stdout.strip() for _ in range(2)]
    assert paths[0] == paths[1]
    assert Path(paths[0]).stat().st_size > 50_000_000


def test_convert_writes_the_directory_that_other_servers_read(tmp_path: Path) -> None:
    target = tmp_path / "smollm2-hf"
    ended = penstock("convert", MODEL, "--to", "hf", str(target), "--dtype", "bfloat16")
    assert ended.returncode == 0, ended.stderr
    assert str(target) in ended.stdout
    assert "100%" in ended.stderr
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
