"""Stores of files: one contract for directories and for S3."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, InvalidValue, StoreCorrupt, StoreUnavailable
from penstock.core.s3 import Credentials, Signer
from penstock.gateway.batches.object_store import DirectoryStore, ObjectStore, object_store
from penstock.gateway.batches.s3 import s3_store
from tests.fake_s3 import KEYS, REGION, FakeS3, fake_s3


@pytest.fixture(scope="module")
def s3() -> Iterator[FakeS3]:
    with fake_s3() as found:
        yield found


def at(s3: FakeS3, **environment: str) -> ObjectStore:
    store = s3_store(f"s3://bucket/some/prefix?endpoint={s3.url}&region={REGION}", KEYS | environment)
    store._pause = lambda _: None
    return store


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "new" / "files")
    return at(request.getfixturevalue("s3"))


def test_an_object_is_there_from_its_writing_to_its_end(store: ObjectStore) -> None:
    data = bytes(range(256)) * 5000
    store.put("file-1/000000", data)
    store.put("file-1/000001-2", b"")
    assert store.get("file-1/000000") == data
    assert store.get("file-1/000001-2") == b""
    store.put("file-1/000000", b"again")
    assert store.get("file-1/000000") == b"again"
    for _ in range(2):
        store.delete("file-1/000000")
    with pytest.raises(StoreCorrupt):
        store.get("file-1/000000")
    store.delete("file-1/000001-2")


@pytest.mark.parametrize("name", ["", "/x", "../x", "a/../x", "a/b/c", "a//b", "a/.b", "a b", "a\x00", "a/b\n"])
def test_no_name_leads_elsewhere(store: ObjectStore, name: str) -> None:
    for use in (store.get, store.delete, lambda name: store.put(name, b"")):
        with pytest.raises(InvalidValue):
            use(name)


def test_files_of_a_directory_are_their_owners_alone(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "files").put("file-1/0", b"secret")
    (found,) = (tmp_path / "files").rglob("0")
    assert (found.stat().st_mode & 0o777, found.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (tmp_path / "none").write_text("no directory")
    with pytest.raises(StoreUnavailable):
        DirectoryStore(tmp_path / "none").put("file-1/0", b"")


def test_objects_of_a_bucket_are_under_its_prefix(s3: FakeS3) -> None:
    at(s3).put("file-7/0", b"x")
    assert s3.objects["/bucket/some/prefix/file-7/0"] == b"x"


def test_a_bucket_that_is_busy_is_asked_again_and_one_that_refuses_is_not(s3: FakeS3) -> None:
    store = at(s3)
    s3.failures[:] = [503, 500]
    store.put("file-8/0", b"x")
    assert store.get("file-8/0") == b"x"
    s3.failures[:] = [503] * 4
    with pytest.raises(StoreUnavailable, match=r"status 503 .SlowDown."):
        store.put("file-8/0", b"x")
    before = s3.answers[403]
    with pytest.raises(StoreUnavailable, match="SignatureDoesNotMatch"):
        at(s3, AWS_SECRET_ACCESS_KEY="wrong").get("file-8/0")
    assert s3.answers[403] == before + 1


@pytest.mark.parametrize(
    ("token", "signature"),
    [
        ("", "1e655f6f0764196f791bbd9d46339dd8f5f56191e0e75e31e830e2da2f0f4e0b"),
        ("token", "ab9a9bd000ad7cc5bb3332b3637660327888c2972ddef6f392d03c31fdaf182c"),
    ],
)
def test_signatures_are_those_of_awss_own_client(token: str, signature: str) -> None:
    """As botocore signs the same request."""
    signer = Signer(Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", token), "us-east-1")
    host, path = "examplebucket.s3.amazonaws.com", "/prefix/file-1/000000-1"
    headers = signer.headers("PUT", host, path, b"Welcome to Amazon S3.", datetime(2013, 5, 24, tzinfo=UTC))
    assert headers["authorization"].rpartition("=")[2] == signature


def test_temporary_keys_are_sent_with_their_token(s3: FakeS3) -> None:
    at(s3, AWS_SESSION_TOKEN="token").put("file-9/0", b"x")


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("files", "absolute"),
        ("ftp://host/x", "directory, or s3"),
        ("s3://", "BUCKET"),
        ("s3://key:secret@bucket/x", "environment"),
        ("s3://bucket/x?colour=red", "colour"),
        ("s3://bucket/x?endpoint=minio:9000", "URL"),
    ],
)
def test_a_place_of_no_use_is_refused_by_name(place: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem) as refused:
        object_store(place)
    assert refused.value.param == "batches.files"


def test_a_bucket_needs_keys() -> None:
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        s3_store("s3://bucket/x", {})
