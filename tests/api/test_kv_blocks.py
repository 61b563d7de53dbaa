import hypothesis.strategies as st
import msgspec
from hypothesis import given

from penstock.api import kv_blocks
from penstock.api.kv_blocks import BlockNews, pack, unpack


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_hashes_arrive_as_they_were_sent(hashes: list[int]) -> None:
    news = BlockNews("b", 3, size=256, hashes=pack(hashes))
    found = kv_blocks.decode(kv_blocks.encode(news))
    assert found == news
    assert found is not None
    assert found.hashes is not None
    assert list(unpack(found.hashes)) == hashes


def test_what_a_later_version_adds_is_skipped() -> None:
    found = kv_blocks.decode(b'{"boot":"b","seq":4,"after":3,"tier":"disk","stored":""}')
    assert found == BlockNews("b", 4, after=3)


@given(st.binary() | st.just(b'{"boot":"b","seq":4,"stored":"not base64!"}') | st.just(b"[1]"))
def test_what_is_not_news_is_none_and_no_error(data: bytes) -> None:
    assert kv_blocks.decode(data) is None


def test_a_snapshot_of_a_large_cache_is_small() -> None:
    news = BlockNews("0" * 32, 1, size=256, hashes=pack(range(2**63, 2**63 + 2400)))
    assert len(kv_blocks.encode(news)) < 26_000
    assert msgspec.json.decode(kv_blocks.encode(news))["seq"] == 1
