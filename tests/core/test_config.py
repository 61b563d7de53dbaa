import pytest

from penstock.core.config import build, nearest
from penstock.core.errors import ConfigError
from penstock.core.settings import Settings


def test_nested_sections_are_built_and_the_rest_keeps_its_defaults() -> None:
    settings = build(Settings, {"model": "m.gguf", "engine": {"block_size": 32}, "slo": {"tpot_s": None}})
    assert settings.model == "m.gguf"
    assert settings.engine.block_size == 32
    assert settings.engine.dtype == "auto"
    assert settings.slo.tpot_s is None


def test_swapped_letters_are_the_likeliest_slip() -> None:
    assert nearest("--prot", ["--tpot", "--port", "--proxy"]) == "--port"
    assert nearest("--prox", ["--tpot", "--port", "--proxy"]) == "--proxy"
    assert nearest("zzz", ["--port"]) is None


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'engine\.blok_size'; did you mean 'engine\.block_size'"):
        build(Settings, {"engine": {"blok_size": 32}})


@pytest.mark.parametrize(
    "engine", [{"block_size": 0}, {"block_size": "16"}, {"memory_fraction": 1.5}, {"dtype": "int3"}, {"threads": -1}]
)
def test_a_bad_value_names_its_setting(engine: dict[str, object]) -> None:
    (name,) = engine
    with pytest.raises(ConfigError, match=rf"engine\.{name}"):
        build(Settings, {"engine": engine})
