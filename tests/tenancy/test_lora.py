"""Which adapters gateways brought to replicas, on both databases."""

from penstock.tenancy.store import Store


def test_what_was_brought_is_known_until_it_is_gone_and_only_once(store: Store) -> None:
    assert store.adapters.all() == {}
    assert store.adapters.bring("http://a", "poet")
    assert not store.adapters.bring("http://a", "poet")
    assert store.adapters.bring("http://a", "bard")
    assert store.adapters.bring("http://b", "poet")
    assert store.adapters.all() == {"http://a": {"poet", "bard"}, "http://b": {"poet"}}
    store.adapters.forget("http://a", "poet")
    store.adapters.forget("http://a", "poet")
    assert store.adapters.all() == {"http://a": {"bard"}, "http://b": {"poet"}}
