"""The rows of the status table, as Anthropic's client sees them."""

from collections.abc import Callable, Iterator

import anthropic
import msgspec
import pytest

from penstock.api.asgi import Request, Route, Router
from penstock.api.errors import ANTHROPIC, STATUS_TABLE, anthropic_error_body, anthropic_status, anthropic_type
from penstock.api.sink import Sink
from penstock.core import errors
from penstock.core.errors import PenstockError
from tests.api.serving import running

ClientSees = Callable[[PenstockError], anthropic.APIStatusError]


@pytest.fixture(scope="module")
def client_sees() -> Iterator[ClientSees]:
    raised: list[PenstockError] = []

    async def fail(request: Request, sink: Sink) -> None:
        raise raised[-1]

    with (
        running(Router([Route("POST", "/v1/messages", fail, ANTHROPIC)])) as (host, port),
        anthropic.Anthropic(api_key="none", base_url=f"http://{host}:{port}", max_retries=0) as client,
    ):

        def ask(error: PenstockError) -> anthropic.APIStatusError:
            raised.append(error)
            with pytest.raises(anthropic.APIStatusError) as caught:
                client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
            return caught.value

        yield ask


@pytest.mark.parametrize(
    ("error", "expected", "kind"),
    [
        (errors.InvalidRequest("bad"), anthropic.BadRequestError, "invalid_request_error"),
        (errors.ModelNotFound("where"), anthropic.NotFoundError, "not_found_error"),
        (errors.EngineFailed("died"), anthropic.InternalServerError, "api_error"),
    ],
)
def test_the_client_raises_its_own_class(
    client_sees: ClientSees, error: PenstockError, expected: type, kind: str
) -> None:
    seen = client_sees(error)
    assert (type(seen), seen.type, seen.api_message) == (expected, kind, error.message)
    assert seen.request_id


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.Overloaded("busy", retry_after_s=3), 529, "overloaded_error"),
        (errors.EngineUnavailable("wait", retry_after_s=3), 503, "api_error"),
    ],
)
def test_what_passes_says_when_to_come_back(
    client_sees: ClientSees, error: PenstockError, status: int, kind: str
) -> None:
    seen = client_sees(error)
    assert isinstance(seen, anthropic.InternalServerError)
    assert (seen.status_code, seen.type, seen.response.headers["retry-after"]) == (status, kind, "3")


def test_the_client_reads_the_stable_code(client_sees: ClientSees) -> None:
    assert client_sees(errors.UnsupportedParameter("tools: no", param="tools")).error_code == "unsupported_parameter"


def test_the_body_has_every_key_even_when_it_is_null() -> None:
    assert msgspec.json.decode(anthropic_error_body(errors.NotFound("nothing"), "r1")) == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "nothing",
            "details": {"error_code": "not_found", "param": None, "reason": None},
        },
        "request_id": "r1",
    }


@pytest.mark.parametrize("cls", STATUS_TABLE)
def test_every_row_has_a_status_and_a_type_of_the_same_kind(cls: type[PenstockError]) -> None:
    status = anthropic_status(cls("x"))
    is_theirs = anthropic_type(status) not in ("api_error", "overloaded_error", "timeout_error")
    assert is_theirs == (status < 500)
