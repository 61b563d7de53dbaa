"""What one adapter computed is found by nobody else, and a gateway names its blocks as the engine does."""

from __future__ import annotations

from penstock.core.hashing import root_hash, routing_hashes
from penstock.core.request import AdapterRef
from penstock.kv.cache import TokenHashes

TOKENS = list(range(40))


def chain(namespace: str = "", adapter: AdapterRef | None = None) -> TokenHashes:
    hashes = TokenHashes(namespace, 4, adapter)
    hashes.extend(TOKENS)
    return hashes


def test_blocks_are_known_by_the_adapter_s_content_and_not_by_its_name() -> None:
    poet = chain(adapter=AdapterRef("digest 1", "poet")).hashes
    assert poet == chain(adapter=AdapterRef("digest 1", "other name")).hashes
    others = [chain().hashes, chain(adapter=AdapterRef("digest 2", "poet")).hashes, chain("digest 1").hashes]
    assert not any(set(poet) & set(other) for other in others)


def test_no_namespace_spells_an_adapter_s() -> None:
    roots = {root_hash(ns, adapter) for ns in ("", "a", "ab", "1:ab", "2:ab") for adapter in ("", "a", "ab", "b")}
    assert len(roots) == 20


def test_gateway_and_engine_name_the_same_routing_blocks() -> None:
    hashes = chain("acme", AdapterRef("digest", "poet"))
    found = [hashes.routing_hash(index, TOKENS, 8) for index in range(5)]
    assert found == routing_hashes("acme", TOKENS, 8, adapter="poet")
    assert found != routing_hashes("acme", TOKENS, 8)
