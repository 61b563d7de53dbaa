"""The cache over a hub on a local port: one download for all, limits, pins, leases, and kill -9 at every moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import Conflict, ModelMissing
from penstock.hub.cache.record import read_record
from penstock.hub.cache.weights import WeightsCache
from penstock.hub.hf_download import HubSource
from penstock.hub.sources import cached, weights_cache
from tests.hub.local_hub import WEIGHTS, LocalHub
from tests.waiting import eventually

pytestmark = pytest.mark.slow

TINY = HubSource("ada/tiny")
SPEC = TINY.spec
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}  # events of sys.audit
WRITES = os.O_WRONLY | os.O_RDWR
# A process that uses a model, says so, and ends with its standard input.
USE = (  # a shell's background job ignores SIGINT, and so do its children
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from penstock.hub.sources import *; "
    "c, s = weights_cache(), source_of(sys.argv[1]); c.hold(s); print(c.ensure(s), flush=True); sys.stdin.read()"
)


def user_of(spec: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", USE, spec]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def models(hub: LocalHub, tmp_path: Path) -> Path:
    return tmp_path / "models"


def ensure() -> Path:
    return weights_cache().ensure(TINY)


def put(models: Path, name: str, num_bytes: int, used_at: float) -> HubSource:
    """Another model in the cache."""
    source = HubSource(f"ada/{name}")
    (directory := models / source.place).mkdir(parents=True)
    (directory / "config.json").write_bytes(b"x" * num_bytes)
    os.utime(directory, (used_at, used_at))
    return source


def names(models: Path) -> list[str]:
    return [model.model for model in weights_cache().models()]


def test_one_answer_says_whether_a_model_is_cached_and_what_it_took(models: Path) -> None:
    assert cached(SPEC) is None
    path = ensure()
    found = cached(SPEC)
    assert found is not None
    assert (found.path, found.state, found.fetched_bytes) == (path, "complete", len(WEIGHTS) + 10)
    assert found.num_bytes >= len(WEIGHTS) + 10
    assert found.fetch_s is not None
    assert found.fetch_s > 0


def test_a_file_of_the_users_is_cached_where_it_is(tmp_path: Path) -> None:
    (path := tmp_path / "model.gguf").write_bytes(b"12345")
    for spec in (str(path), f"file:{path}", f"file://{path}"):
        found = cached(spec)
        assert found is not None
        assert (found.path, found.num_bytes) == (path, 5)


def test_of_two_processes_one_downloads_and_both_have_it(hub: LocalHub, models: Path) -> None:
    users = [user_of(SPEC) for _ in range(2)]
    paths = [user.stdout.readline() for user in users if user.stdout is not None]
    assert paths == [f"{models / TINY.place}\n".encode()] * 2
    assert len(hub.fetches("model.safetensors")) == 1
    with pytest.raises(Conflict, match="used by a process that runs"):
        weights_cache().remove(TINY)
    users[0].communicate()
    users[1].kill()
    users[1].wait()
    assert weights_cache().remove(TINY) >= len(WEIGHTS)
    assert names(models) == []


def test_a_process_that_is_killed_in_a_download_leaves_no_half_model(hub: LocalHub, models: Path) -> None:
    hub.cut_after, hub.stalls = 500_000, True
    user = user_of(SPEC)
    eventually(lambda: hub.fetches("model.safetensors"))
    assert [(model.state, model.is_in_use) for model in weights_cache().models()] == [("partial", True)]
    user.kill()
    user.communicate()
    assert cached(SPEC) is None
    assert [(model.state, model.is_in_use) for model in weights_cache().models()] == [("partial", False)]
    hub.cut_after, hub.stalls = None, False
    assert (ensure() / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(models.rglob("*.incomplete"))


def test_an_interrupt_ends_a_download_at_once(hub: LocalHub) -> None:
    hub.cut_after, hub.stalls = 500_000, True
    with user_of(SPEC) as user:
        eventually(lambda: hub.fetches("model.safetensors"))
        user.send_signal(signal.SIGINT)
        user.communicate()
    assert len(hub.fetches("model.safetensors")) == 1  # it was not left to its own timeout


def test_a_model_that_is_pulled_again_is_not_as_old_as_its_last_use(models: Path) -> None:
    ensure()
    user_of(SPEC).communicate()
    os.utime(models / ".locks" / "hf--ada--tiny.use", (1000, 1000))
    weights_cache().remove(TINY)
    os.utime(models / ".locks" / "hf--ada--tiny.use", (1000, 1000))
    ensure()
    found = cached(SPEC)
    assert found is not None
    assert found.last_used_at == found.fetched_at


def fetch_killed_at(moment: int, models: Path) -> None:
    """Ends with SIGKILL before the given change in the cache's directory, counted from the fetch's beginning."""
    done = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal done
        is_change = event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES)
        if is_change and str(arguments[0]).startswith(str(models)):
            done += 1
            if done == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    ensure()


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.drill)])
def test_a_model_is_whole_or_not_there_after_kill_9_at_any_change(hub: LocalHub, models: Path, stride: int) -> None:
    from huggingface_hub import HfApi, snapshot_download  # noqa: F401 (once, and not in each of the processes)

    del hub.files["tokenizer.json"]
    processes = multiprocessing.get_context("fork")
    exit_codes: list[int | None] = []
    while not exit_codes or exit_codes[-1] == -signal.SIGKILL:
        process = processes.Process(target=fetch_killed_at, args=(stride * (len(exit_codes) + 1), models))
        process.start()
        process.join()
        exit_codes.append(process.exitcode)
        if cached(SPEC) is not None:
            assert weights_cache().verify(TINY) == []
        ensure()
        assert weights_cache().verify(TINY) == []
        assert not list(models.rglob("*.incomplete"))
        weights_cache().remove(TINY)
    assert exit_codes[-1] == 0
    assert len(exit_codes) * stride > 40


def test_a_damaged_file_is_named_taken_out_and_fetched_again(hub: LocalHub) -> None:
    path = ensure()
    (path / "model.safetensors").write_bytes(b"?" + WEIGHTS[1:])
    assert weights_cache().verify(TINY) == ["model.safetensors"]
    assert cached(SPEC) is None
    assert (ensure() / "model.safetensors").read_bytes() == WEIGHTS
    assert weights_cache().verify(TINY) == []
    assert len(hub.fetches("model.safetensors")) == 2
    assert len(hub.fetches("tokenizer.json")) == 1


def test_a_file_that_was_cut_short_is_noticed_at_the_next_start(hub: LocalHub) -> None:
    path = ensure()
    (path / "model.safetensors").write_bytes(WEIGHTS[:1000])
    assert (ensure() / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.fetches("tokenizer.json")) == 1


def test_a_pin_lasts_through_a_repair_and_keeps_from_removal(models: Path) -> None:
    with pytest.raises(ModelMissing, match="penstock models pull"):
        weights_cache().pin(TINY, True)
    path = ensure()
    weights_cache().pin(TINY, True)
    (path / "config.json").unlink()
    ensure()
    with pytest.raises(Conflict, match="is pinned"):
        weights_cache().remove(TINY)
    weights_cache().pin(TINY, False)
    weights_cache().remove(TINY)
    assert cached(SPEC) is None


def test_the_least_recently_used_models_go_to_make_room(
    hub: LocalHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(models, "old", 1_000_000, used_at=1000)
    weights_cache().pin(pinned := put(models, "pinned", 500_000, used_at=500), True)
    put(models, "new", 500_000, used_at=2000)
    monkeypatch.setenv("PENSTOCK_MODELS_LIMIT", "2.5MB")
    said: list[str] = []
    weights_cache().ensure(TINY, lambda what, done, total: said.append(what))
    assert [(model.model, model.state) for model in weights_cache().models()] == [
        ("hf:ada/new", "complete"),
        (pinned.spec, "complete"),
        (SPEC, "complete"),
    ]
    assert "removed hf:ada/old (1.0 MB) to make room" in said


def test_a_model_that_a_process_uses_is_not_removed_to_make_room(
    hub: LocalHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = put(models, "used", 1_000_000, used_at=1000)
    monkeypatch.setenv("PENSTOCK_MODELS_LIMIT", "2MB")
    with user_of(used.spec) as user:
        assert user.stdout is not None
        assert user.stdout.readline()
        with pytest.raises(ModelMissing, match=r"1\.0 MB are pinned or in use"):
            ensure()
        user.kill()
    ensure()
    assert names(models) == [SPEC]


def test_a_model_beyond_the_limit_is_refused_and_nothing_goes(
    hub: LocalHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = put(models, "old", 1000, used_at=1000)
    monkeypatch.setenv("PENSTOCK_MODELS_LIMIT", "1MB")
    with pytest.raises(ModelMissing, match=r"limit is 1\.0 MB: the model has 1\.3 MB"):
        ensure()
    assert names(models) == [old.spec]
    assert not hub.fetches("model.safetensors")


def test_a_model_that_is_being_fetched_counts_with_all_its_bytes(hub: LocalHub, models: Path) -> None:
    hub.cut_after, hub.stalls = 0, True
    user = user_of(SPEC)
    eventually(lambda: hub.fetches("model.safetensors"))

    record = read_record(models / ".partial" / TINY.place)
    assert record is not None
    assert record.num_bytes == len(WEIGHTS) + 10
    (found,) = weights_cache().models()
    assert found.num_bytes >= len(WEIGHTS) + 10
    user.kill()
    user.communicate()


def test_a_cache_that_cannot_be_written_still_serves(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure()

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(models))

    monkeypatch.setattr("penstock.hub.cache.entry.make_private", refuse)
    weights_cache().hold(TINY)
    assert ensure() == path


def test_what_belongs_to_no_source_is_left_alone(models: Path) -> None:
    ensure()
    (models / "mine").mkdir()
    (models / "mine" / "config.json").write_text("{}")
    assert names(models) == [SPEC]
    assert WeightsCache(models, lambda place: None).models() == []


def test_nobody_is_asked_about_a_model_that_is_there(hub: LocalHub) -> None:
    ensure()
    hub.requests.clear()
    ensure()
    assert hub.requests == []
