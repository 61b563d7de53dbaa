"""The status table is complete, and OpenAI's client raises the right exception for each row."""

from collections.abc import Callable, Iterator

import msgspec
import openai
import pytest

from penstock.api.asgi import Request, Route, Router
from penstock.api.errors import STATUS_TABLE, error_body, error_headers, http_error
from penstock.api.sink import Sink
from penstock.core import errors
from penstock.core.errors import PenstockError, all_errors
from tests.api.serving import running

ClientSees = Callable[[PenstockError], openai.APIStatusError]


@pytest.fixture(scope="module")
def client_sees() -> Iterator[ClientSees]:
    """What the official client raises when a server answers with the error."""
    raised: list[PenstockError] = []

    async def fail(request: Request, sink: Sink) -> None:
        raise raised[-1]

    with (
        running(Router([Route("GET", "/v1/models", fail)])) as (host, port),
        openai.OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1", max_retries=0) as client,
    ):

        def ask(error: PenstockError) -> openai.APIStatusError:
            raised.append(error)
            with pytest.raises(openai.APIStatusError) as caught:
                client.models.list()
            return caught.value

        yield ask


def test_every_error_has_a_row_of_its_own() -> None:
    shipped = {cls for cls in all_errors() if cls.__module__.startswith("penstock.")}
    assert shipped == set(STATUS_TABLE)


def test_an_error_without_a_row_takes_its_parents() -> None:
    class TenantOverLimit(errors.Overloaded):
        code = "tenant_over_limit"

    assert http_error(TenantOverLimit("slow down")).status == 429


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.InvalidRequest("bad"), openai.BadRequestError),
        (errors.ContextLengthExceeded("long"), openai.BadRequestError),
        (errors.UnsupportedParameter("no"), openai.BadRequestError),
        (errors.ModelNotFound("where"), openai.NotFoundError),
        (errors.Overloaded("busy"), openai.RateLimitError),
        (errors.EngineFailed("died"), openai.InternalServerError),
        (errors.EngineUnavailable("wait"), openai.InternalServerError),
    ],
)
def test_the_openai_client_raises_its_own_class(client_sees: ClientSees, error: PenstockError, expected: type) -> None:
    assert type(client_sees(error)) is expected


def test_the_openai_client_reads_every_field(client_sees: ClientSees) -> None:
    seen = client_sees(errors.UnsupportedParameter("tools: not yet", param="tools"))
    assert (seen.code, seen.param, seen.type) == ("unsupported_parameter", "tools", "invalid_request_error")
    assert "tools: not yet" in seen.message


def test_a_body_that_is_too_large_is_413_and_a_wrong_method_405(client_sees: ClientSees) -> None:
    assert client_sees(errors.BodyTooLarge("big")).status_code == 413
    assert client_sees(errors.MethodNotAllowed("no")).status_code == 405


def test_the_body_has_all_four_keys_even_when_they_are_null() -> None:
    body = msgspec.json.decode(error_body(errors.NotFound("nothing here")))
    assert body == {"error": {"message": "nothing here", "type": "not_found_error", "param": None, "code": "not_found"}}


@pytest.mark.parametrize(("wait_s", "header"), [(None, b"1"), (0.0, b"1"), (0.2, b"1"), (2.1, b"3"), (30.0, b"30")])
def test_retry_after_is_whole_seconds_rounded_up(wait_s: float | None, header: bytes) -> None:
    assert error_headers(errors.Overloaded("busy", retry_after_s=wait_s)) == [(b"retry-after", header)]


def test_only_errors_that_pass_carry_retry_after() -> None:
    assert error_headers(errors.EngineUnavailable("starting")) == [(b"retry-after", b"1")]
    assert error_headers(errors.InvalidRequest("bad", retry_after_s=5.0)) == []
