from __future__ import annotations

import pytest

from penstock.dialects.detect import detect, paths
from penstock.dialects.engines import DIALECTS
from penstock.dialects.engines.llamacpp import LLAMACPP
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.engines.tgi import TGI
from penstock.dialects.engines.triton import TRITON
from penstock.dialects.engines.trtllm import TRTLLM
from penstock.dialects.engines.vllm import VLLM
from penstock.dialects.liveness import Answer, Liveness, Verdict, judge, liveness, retry_after_s

STARTING = Answer(503, {b"retry-after": b"1", b"x-trtllm-server-state": b"starting"})


def test_refused_is_gone_and_silence_is_not() -> None:
    for dialect in DIALECTS.values():
        assert liveness(dialect, None, is_refused=True, was_ready=False) is Liveness.GONE
        assert liveness(dialect, None, is_refused=False, was_ready=True) is Liveness.FAILING


def test_a_server_that_says_that_it_starts_is_not_dead() -> None:
    assert liveness(TRTLLM, STARTING, is_refused=False, was_ready=False) is Liveness.STARTING
    assert liveness(TRTLLM, STARTING, is_refused=False, was_ready=True) is Liveness.STARTING  # again
    assert liveness(TRTLLM, Answer(503), is_refused=False, was_ready=False) is Liveness.FAILING
    loads = Answer(503, {}, b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}')
    assert liveness(LLAMACPP, loads, is_refused=False, was_ready=True) is Liveness.STARTING


def test_where_503_is_all_there_is_it_means_another_thing_before_and_after() -> None:
    assert liveness(TGI, Answer(503), is_refused=False, was_ready=False) is Liveness.STARTING
    assert liveness(TGI, Answer(503), is_refused=False, was_ready=True) is Liveness.FAILING
    assert liveness(VLLM, Answer(503), is_refused=False, was_ready=False) is Liveness.FAILING  # its engine is dead


@pytest.mark.parametrize("status", [200, 204, 404, 405, 429])
def test_any_answer_of_one_that_works_is_ready(status: int) -> None:
    assert liveness(OPENAI, Answer(status), is_refused=False, was_ready=True) is Liveness.READY


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize("name", DIALECTS)
def test_every_way_to_say_overloaded_means_try_elsewhere(name: str, status: int) -> None:
    found = judge(DIALECTS[name], Answer(status, {b"retry-after": b"7"}), now_s=0.0)
    assert found == (Verdict.OVERLOADED, 7.0)


def test_an_error_that_is_the_clients_goes_to_the_client() -> None:
    assert judge(VLLM, Answer(400), 0.0).verdict is Verdict.ANSWERED
    assert judge(VLLM, Answer(500), 0.0).verdict is Verdict.FAILED
    assert judge(TRITON, Answer(400, {}, b'{"error":"Exceeds maximum queue size"}'), 0.0).verdict is Verdict.OVERLOADED
    assert judge(TRTLLM, STARTING, 0.0) == (Verdict.STARTING, 1.0)


def test_when_to_come_back_is_read_in_every_form() -> None:
    assert retry_after_s({b"retry-after": b"2.5"}, 0.0) == 2.5
    assert retry_after_s({b"retry-after": b"9", b"retry-after-ms": b"250"}, 0.0) == 0.25
    assert retry_after_s({b"retry-after": b"Sun, 06 Nov 1994 08:49:37 GMT"}, 784111772.0) == 5.0
    assert retry_after_s({b"retry-after": b"Sun, 06 Nov 1994 08:49:37 GMT"}, 784111999.0) == 0.0
    for nonsense in (b"", b"soon", b"-1", b"nan", b"1e99"):
        assert retry_after_s({b"retry-after": nonsense}, 0.0) is None
    assert retry_after_s({}, 0.0) is None


def test_an_unknown_server_is_plain_openai() -> None:
    assert detect({}) is OPENAI
    assert detect({"/v1/models": Answer(200, {}, b'{"data":[{"id":"gpt","owned_by":"openai"}]}')}) is OPENAI
    assert detect({path: Answer(404, {b"server": b"nginx"}) for path in paths("m")}) is OPENAI


def test_one_sign_is_enough_and_more_signs_win() -> None:
    assert detect({"/props": Answer(404, {b"server": b"llama.cpp"})}) is LLAMACPP
    spaced = Answer(200, {}, b'{"data": [{"id": "m", "owned_by": "vllm"}]}')
    assert detect({"/v1/models": spaced}) is VLLM
    assert detect({"/v1/models": Answer(500, {}, b'"owned_by":"vllm"')}) is OPENAI
