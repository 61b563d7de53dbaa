from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.model_names import NamedModel, name_and_model
from penstock.cli.serve_models import read_models
from penstock.core.errors import ConfigError
from penstock.core.settings import Settings


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("smollm2", NamedModel(None, "smollm2")),
        ("second=smollm2", NamedModel("second", "smollm2")),
        ("qwen-3.0=/models/a=b", NamedModel("qwen-3.0", "/models/a=b")),
        ("/models/a=b", NamedModel(None, "/models/a=b")),
        ("hf:org/name", NamedModel(None, "hf:org/name")),
        ("x=https://host/model?key=1", NamedModel("x", "https://host/model?key=1")),
        ("https://host/model?key=1", NamedModel(None, "https://host/model?key=1")),
    ],
)
def test_a_name_stands_before_the_first_equals_sign(text: str, found: NamedModel) -> None:
    assert name_and_model(text) == found


def test_a_name_alone_is_no_model() -> None:
    with pytest.raises(ConfigError, match="NAME=MODEL"):
        name_and_model("second=")


def test_models_of_the_command_line_and_of_a_file_go_together(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  code: {model: hf:a/b, engine: {max_model_len: 100}}\n  smollm2:\n")
    named = [name_and_model("second=smollm2")]
    entries = read_models(Settings(), named, file).entries()
    assert {name: one.model for name, one in entries.items()} == {
        "code": "hf:a/b",
        "smollm2": "smollm2",
        "second": "smollm2",
    }
    assert entries["code"].engine == {"max_model_len": 100}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]", "models.yaml:1: they are a mapping"),
        ("models:\n  a: 3", "models.yaml:2: it is a model"),
        ("models:\n  a: {modle: x}", "models.yaml:2: unknown setting 'models.a.modle'; did you mean 'models.a.model'"),
        ("models:\n  b: x", "models.yaml:2: the model b is in this file already"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_models(Settings(), [NamedModel("b", "x")], file)


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 models with the name smollm2"):
        read_models(Settings(), [name_and_model("smollm2"), name_and_model("smollm2")], None)
