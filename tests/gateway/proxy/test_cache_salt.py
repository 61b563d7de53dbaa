from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.hashing import cache_namespace
from penstock.gateway.proxy.cache_salt import CacheSalts, key_in
from penstock.gateway.settings.gateway import GatewaySettings, salts_of

SALTS = CacheSalts(b"key")


@pytest.mark.parametrize(("namespace", "own"), [("", ""), ("acme", ""), ("acme", "own"), ("", "own"), ("acme", "é\0")])
def test_a_salt_tells_its_gateway_whose_it_is(namespace: str, own: str) -> None:
    salt = SALTS.salt(namespace, own)
    assert salt
    assert SALTS.namespace_of(salt) == cache_namespace(namespace, own)


def test_nobody_without_the_key_can_make_anothers() -> None:
    salt = SALTS.salt("acme")
    assert salt != CacheSalts(b"other").salt("acme")
    assert salt not in (SALTS.salt("", "acme"), SALTS.salt("", "4:acme"), SALTS.salt("", salt), SALTS.salt("a", "cme"))
    for forged in ("4:acme", CacheSalts(b"other").salt("acme"), salt[:-1], "x" + salt, "acme"):
        assert SALTS.namespace_of(forged)[:1] == "?"  # begins no namespace
    assert SALTS.namespace_of("") == ""


def test_gateways_of_one_home_have_the_same_key_and_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "home" / "cache_salt.key"
    key = key_in(path)
    assert len(key) == 32
    assert key_in(path) == key
    assert path.stat().st_mode & 0o077 == 0
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    first, second = (salts_of(GatewaySettings(), path.parent).salt("acme") for _ in range(2))
    assert first == second == CacheSalts(key).salt("acme")


def test_the_key_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GatewaySettings(cache_salt_env="SALT_KEY")
    with pytest.raises(ConfigError, match="SALT_KEY"):
        salts_of(settings, tmp_path)
    monkeypatch.setenv("SALT_KEY", "secret")
    assert salts_of(settings, tmp_path).salt("acme") == CacheSalts(b"secret").salt("acme")
    assert not list(tmp_path.iterdir())
