from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, ModelMissing
from penstock.hub.cache.room import CachedModel, Need, limit_bytes, to_remove

FREE = 10**12


def model(
    name: str, num_bytes: int, last_used_at: float = 0, *, pinned: bool = False, used: bool = False
) -> CachedModel:
    return CachedModel(
        model=name,
        place=name,
        path=Path(name),
        num_bytes=num_bytes,
        last_used_at=last_used_at,
        pinned=pinned,
        is_in_use=used,
    )


def removed(*models: CachedModel, need: int, limit: int = FREE, free: int = FREE) -> list[str]:
    return [each.model for each in to_remove(models, Need(need, need), limit=limit, free_bytes=free)]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("200GB", 200 * 10**9), ("1.5 TiB", 3 * 2**39), ("80%", 800), ("200%", 1000), ("4096", 4096), ("10mb", 10**7)],
)
def test_a_limit_is_a_size_or_a_share_of_the_disk(text: str, num_bytes: int) -> None:
    assert limit_bytes(text, disk_bytes=1000) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "80 %%", "GB"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_MODELS_LIMIT"):
        limit_bytes(text, disk_bytes=1000)


def test_nothing_goes_while_there_is_room() -> None:
    assert removed(model("a", 50), need=50, limit=100) == []


def test_the_least_recently_used_goes_first_and_no_more_than_must() -> None:
    models = [model("new", 40, 3), model("old", 40, 1), model("older", 10, 0.5)]
    assert removed(*models, need=20, limit=100) == ["older"]
    assert removed(*models, need=30, limit=100) == ["older", "old"]


def test_what_is_pinned_or_in_use_stays() -> None:
    models = [model("pinned", 40, 1, pinned=True), model("used", 30, 2, used=True), model("free", 20, 3)]
    assert removed(*models, need=30, limit=100) == ["free"]
    with pytest.raises(ModelMissing, match="pinned or in use; unpin or stop some, or set PENSTOCK_MODELS_LIMIT"):
        removed(*models, need=31, limit=100)


def test_a_full_disk_makes_models_go_too() -> None:
    assert removed(model("a", 40, 1), model("b", 40, 2), need=30, free=10) == ["a"]
    with pytest.raises(OSError, match="are needed and"):
        removed(model("a", 40, 1), need=60, free=10)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 9), st.booleans(), st.booleans()), max_size=8),
    st.integers(1, 300),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_afterwards_it_fits_or_nothing_was_removed(
    found: list[tuple[int, int, bool, bool]], need: int, limit: int, free: int
) -> None:
    models = [model(str(at), size, used_at, pinned=pin, used=use) for at, (size, used_at, pin, use) in enumerate(found)]
    try:
        gone = to_remove(models, Need(need, need), limit=limit, free_bytes=free)
    except (ModelMissing, OSError):
        gain = sum(each.num_bytes for each in models if not each.pinned and not each.is_in_use)
        assert sum(each.num_bytes for each in models) - gain + need > limit or free + gain < need
        return
    assert not any(each.pinned or each.is_in_use for each in gone)
    freed = sum(each.num_bytes for each in gone)
    assert sum(each.num_bytes for each in models) - freed + need <= limit
    assert free + freed >= need
