"""Files of settings: what is wrong is told with the file and the line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.config_file import read_config_file
from penstock.cli.main import main
from penstock.core.errors import ConfigError

TRACE = Path(__file__).parents[1] / "router" / "data" / "mooncake_conversation_1200.jsonl.xz"
REPLICA = "replicas: [http://127.0.0.1:1]"


def refused(*words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return str(ended.value.code)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "penstock.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"models:\n  a:\n    {REPLICA}\n    fallbak: [b]", ":4: unknown setting 'models.a.fallbak'; did you mean"),
        (f"models:\n  a:\n    {REPLICA}\n    fallback: [c]", ":4: route 'a' falls back to 'c', which is no route"),
        (f"models:\n  abc: {{{REPLICA}}}\n  b:\n    {REPLICA}\n    fallback: [abd]", ":5: route .* did you mean 'abc'"),
        (f"models:\n  a:\n    {REPLICA}\n    aliases: [a]", ":4: 'a' names two routes"),
        ("models:\n  a:\n    replicas:\n    - http://b\n    - 5", r":5: setting 'models.a.replicas': .*\[1\]"),
        ("models:\n  a:\n    replicas:\n    - localhost", ":3: 'localhost' is not the address of an HTTP server"),
        (f"models:\n  a:\n    {REPLICA}\n    key_env: NO_SUCH_KEY", ":4: the environment has no NO_SUCH_KEY"),
        (f"models:\n  gpt-4.1:\n    {REPLICA}\n    dialect: vlm", ":4: 'vlm' is no dialect"),
        (
            f"models:\n  a: {{{REPLICA}}}\n  b:\n    default: a\n    rules:\n    - {{name: x, tools: true, to: a}}\n"
            "    - {name: y, tols: true, to: a}",
            ":7: unknown setting 'models.b.rules.1.tols'; did you mean",
        ),
        (f"watch:\n  alerts:\n    hold_s: -3\nmodels:\n  a: {{{REPLICA}}}", ":3: setting 'watch.alerts.hold_s'"),
        (f"tls_cert: /nowhere\nmodels:\n  a: {{{REPLICA}}}", ":1: cannot use the certificate /nowhere"),
        ("port: 1\nhost: 127.0.0.1\nport: 2", ":3: 'port' is there already, in line 1"),
        ("port: 1\nmodels: {a: [", ":2:1[0-9]: this is not YAML: "),
        ("- a list", " does not hold settings but a list"),
    ],
)
def test_a_gateways_file_is_told_with_the_line(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    told = refused("gateway", "--config", str(path))
    assert re.match(f"penstock: {path}{said}", told), told
    assert "\n" not in told


def test_a_flag_is_not_the_files(path: Path) -> None:
    path.write_text("engine:\n  block_size: 16\n  threads: many\n")
    assert refused("serve", "--config", str(path)).startswith(f"penstock: {path}:3: setting 'engine.threads'")
    path.write_text("engine:\n  block_size: 16\n")
    assert refused("serve", "--config", str(path), "--block-size", "0").startswith("penstock: setting 'engine.block_")


def test_an_alias_of_itself_has_an_end(path: Path) -> None:
    path.write_text("models: &all\n  a: *all\n")
    assert read_config_file(path).lines == {"models": 1, "models.a": 2}


def test_a_file_that_cannot_be_read_is_one_line(path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^cannot read {path}: No such file or directory$"):
        read_config_file(path)


def test_a_profile_of_the_simulator_is_told_with_the_line(path: Path) -> None:
    path.write_text("name: x\nkv_tokens: 100000\ncost:\n  step_s: 1\n  tokens_s: 1\n")
    told = refused("sim", "run", str(TRACE), "--profile", str(path))
    assert told.startswith(f"penstock: {path}:5: unknown setting 'cost.tokens_s'; did you mean 'cost.token_s'?")
    path.write_text("name: x\nkv_tokens: 100000\ncost:\n  step_s: 1\n")
    told = refused("sim", "run", str(TRACE), "--profile", str(path))
    assert told == f"penstock: {path}:3: setting 'cost.weights_s' is missing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[h100]\nprice_per_hour = 1\nprice_per_hr = 2", ":3: unknown setting 'h100.price_per_hr'; did you mean"),
        ("# mine\nl4.price_per_hour = -1", ":2: setting 'l4.price_per_hour'"),
        ("\n[mine]\nprice_per_hour = 1", ":2: setting 'mine.name' is missing"),
    ],
)
def test_a_table_of_gpus_is_told_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "gpus.toml"
    path.write_text(text)
    assert refused("plan", "llama8b", "--rate", "1", "--hardware", str(path)).startswith(f"penstock: {path}{said}")
