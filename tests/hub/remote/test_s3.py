"""Models of S3, at a fake of it that takes only what is signed as AWS wants it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.cache.record import read_record
from penstock.hub.progress import silent
from penstock.hub.remote.s3 import S3Source
from penstock.hub.resolve import default_name
from penstock.hub.sources import source_of, weights_cache
from tests.fake_s3 import KEYS, REGION, FakeS3, fake_s3
from tests.hub.remote.local_web import contents

WEIGHTS = os.urandom(20_000)
MODEL = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "1_Pooling/config.json": b"{}",
}


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr("penstock.hub.remote.parts.PART_BYTES", 4096)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with fake_s3() as found:
        found.objects = {f"/bucket/some/m%20odel/{name}": content for name, content in MODEL.items()}
        found.objects["/bucket/some/m%20odel/README.md"] = found.objects["/bucket/some/m%20odel/onnx/model.onnx"] = b"?"
        found.objects["/bucket/tiny.gguf"] = WEIGHTS
        yield found


def at(s3: FakeS3, key: str, region: str = REGION) -> str:
    return f"s3://bucket/{key}?endpoint={s3.url}&region={region}"


def pulled(spec: str) -> Path:
    return weights_cache().ensure(S3Source(spec, pause=lambda _: None), silent)


@pytest.mark.parametrize("page_size", [1, 1000])
def test_a_prefix_is_a_model(s3: FakeS3, page_size: int) -> None:
    s3.page_size = page_size
    directory = pulled(at(s3, "some/m odel/"))
    assert contents(directory) == MODEL
    assert S3Source(at(s3, "some/m odel")).read_config() == {}
    assert default_name(at(s3, "some/m odel/")) == "m odel"


def test_a_file_is_fetched_in_parts_and_checked_with_the_stores_hash(s3: FakeS3) -> None:
    spec = at(s3, "tiny.gguf")
    path = pulled(spec)
    assert path.read_bytes() == WEIGHTS
    assert s3.answers == {200: 1, 206: 5}
    (model,) = weights_cache().models()
    assert (model.model, model.state) == (spec, "complete")


def test_a_store_without_hashes_is_believed_once(s3: FakeS3) -> None:
    s3.keeps_checksums = False
    path = pulled(at(s3, "tiny.gguf"))
    record = read_record(path.parent)
    assert record is not None
    assert not record.damaged(path.parent)
    path.write_bytes(WEIGHTS[::-1])
    assert record.damaged(path.parent) == ["tiny.gguf"]


def test_what_is_damaged_in_the_store_is_never_served(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hub.remote.s3._digest", lambda response: f"sha256:{'0' * 64}")
    with pytest.raises(ModelCorrupt, match="arrived damaged 2 times"):
        pulled(at(s3, "tiny.gguf"))


def test_a_public_bucket_needs_no_keys(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.is_public = True
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert pulled(at(s3, "tiny.gguf")).read_bytes() == WEIGHTS


def test_a_busy_store_is_asked_again(s3: FakeS3) -> None:
    s3.failures = [503, 500]
    assert pulled(at(s3, "some/m odel")).is_dir()
    s3.failures = [503] * 100
    with pytest.raises(ModelMissing, match="the store answers 503; check the network and run the same again"):
        pulled(at(s3, "tiny.gguf"))


def test_refusals_say_what_to_do(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelMissing, match="check its name"):
        pulled(at(s3, "none.gguf"))
    with pytest.raises(ModelUnsupported, match=r"has no config\.json with safetensors weights"):
        pulled(at(s3, "none"))
    with pytest.raises(ModelMissing, match="the keys of the environment do not open it"):
        pulled(at(s3, "tiny.gguf", region="elsewhere"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ModelMissing, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        pulled(at(s3, "tiny.gguf"))


def test_addresses_that_are_none_are_refused(s3: FakeS3) -> None:
    with pytest.raises(ModelMissing, match="is not of the form s3://BUCKET/PREFIX"):
        source_of("s3://bucket")
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX"):
        source_of("s3:///tiny.gguf")
    with pytest.raises(ConfigError, match="takes endpoint and region, not 'colour'"):
        source_of("s3://bucket/tiny.gguf?colour=red")
    assert s3.answers == {}
