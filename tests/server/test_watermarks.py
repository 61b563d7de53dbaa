"""Which watermark an answer gets. The fake model says something else for every secret, so it can be seen which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.api import relay
from penstock.core.settings import ServerSettings
from penstock.hub.watermarks import WatermarkFile
from tests.server.replica import Replica, serving

PROMPT = "tell me"
KNOWN = {relay.NAMESPACE_HEADER: "t", relay.SECRET_HEADER: "s3cret"}  # what a gateway says


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> WatermarkFile:
    made = WatermarkFile(tmp_path_factory.mktemp("marks") / "watermarks.json")
    made.add("acme")
    made.add("quiet", scheme="gumbel")
    return made


@pytest.fixture(scope="module")
def free(file: WatermarkFile) -> Iterator[Replica]:
    with serving(ServerSettings(watermark_file=str(file.path))) as found:
        yield found


@pytest.fixture(scope="module")
def bound(file: WatermarkFile) -> Iterator[Replica]:
    """By its operator, and to gateways that know a secret."""
    settings = ServerSettings(watermark_file=str(file.path), watermark="acme", gateway_secret="s3cret")
    with serving(settings) as found:
        yield found


def ask(replica: Replica, headers: dict[str, str] | None = None, **more: object) -> tuple[int, str]:
    """The status, and the text or what was wrong."""
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 12, "seed": 5, **more}
    status, _, answer = replica.call("POST", "/v1/completions", body, **headers or {})
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def text(replica: Replica, file: WatermarkFile, name: str | None, seed: int = 5) -> tuple[int, str]:
    """What the fake model says with this watermark."""
    if name is not None:
        seed += file.find(name).secret[0] + 1
    return 200, replica.answer(PROMPT, 12, seed=seed)


def test_a_request_may_ask_for_one(free: Replica, file: WatermarkFile) -> None:
    assert ask(free) == text(free, file, None)
    assert ask(free, watermark="acme") == text(free, file, "acme")
    assert ask(free, watermark="quiet") == text(free, file, "quiet")
    assert ask(free, watermark=None) == text(free, file, None)


def test_each_of_n_choices_is_marked(free: Replica, file: WatermarkFile) -> None:
    status, _, answer = free.post("/v1/completions", prompt=PROMPT, max_tokens=12, seed=5, n=2, watermark="acme")
    assert status == 200
    assert [c["text"] for c in answer["choices"]] == [text(free, file, "acme", seed)[1] for seed in (5, 6)]


def test_one_that_was_added_later_is_found(free: Replica, file: WatermarkFile) -> None:
    assert ask(free, watermark="late")[0] == 400
    file.add("late")
    assert ask(free, watermark="late") == text(free, file, "late")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"watermark": "nope"}, "watermark: there is none of the name 'nope' here"),
        ({"watermark": 5}, "watermark: expected a string"),
        ({"watermark": ""}, "watermark"),
        ({"watermark": "quiet", "temperature": 0}, "at temperature 0 there is none"),
    ],
)
def test_what_cannot_be_is_refused(free: Replica, more: dict[str, object], problem: str) -> None:
    status, message = ask(free, **more)
    assert status == 400
    assert problem in message


def test_what_the_operator_has_set_no_request_can_change(bound: Replica, file: WatermarkFile) -> None:
    assert ask(bound, bound.known) == text(bound, file, "acme")
    assert ask(bound, bound.known, watermark=None) == text(bound, file, "acme")
    assert ask(bound, bound.known, watermark="acme") == text(bound, file, "acme")
    assert ask(bound, bound.known, watermark="quiet")[0] == 400


def test_a_gateway_says_which_and_its_clients_cannot(bound: Replica, file: WatermarkFile) -> None:
    tenant = KNOWN | {relay.WATERMARK_HEADER: "quiet"}
    assert ask(bound, tenant) == text(bound, file, "quiet")
    assert ask(bound, tenant, watermark="acme")[0] == 400
    assert ask(bound, KNOWN) == text(bound, file, "acme")


def test_only_a_gateway_can(bound: Replica) -> None:
    assert ask(bound, {relay.WATERMARK_HEADER: "quiet"})[0] == 403
    assert ask(bound, {relay.WATERMARK_HEADER: "quiet", relay.SECRET_HEADER: "guessed"})[0] == 403


def test_an_answer_that_cannot_be_marked_is_not_given(
    bound: Replica, caplog: pytest.LogCaptureFixture, file: WatermarkFile
) -> None:
    status, message = ask(bound, KNOWN | {relay.WATERMARK_HEADER: "elsewhere"})
    assert status == 500
    assert "elsewhere" not in message  # whose name is the operator's affair
    assert any("elsewhere" in record.getMessage() for record in caplog.records)


def test_secrets_are_not_logged(bound: Replica, file: WatermarkFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    assert ask(bound, bound.known)[0] == 200
    bound.final_metrics()  # it is noted by then
    secret = file.find("acme").secret
    logged = "".join(record.getMessage() for record in caplog.records)
    assert "route=completions" in logged
    assert secret.hex() not in logged
    assert repr(secret) not in logged
