import pytest

from penstock.gateway.records.token_usage import TokenUsage, find_usage


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}', (9, 2, 4)),
        (b'{"usage":{"input_tokens":5,"output_tokens":2,"cache_read_input_tokens":4}}', (9, 2, 4)),
        (
            b'{"usage":{"input_tokens":2,"output_tokens":2,"cache_creation_input_tokens":3,'
            b'"cache_read_input_tokens":4}}',
            (9, 2, 4),
        ),
        (
            b'data: {"usage":{"prompt_tokens":1}}\n\ndata: {"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n',
            (9, 2, 0),
        ),
    ],
)
def test_a_prompt_is_counted_whole_in_both_dialects(tail: bytes, expected: tuple[int, int, int]) -> None:
    assert find_usage(tail) == TokenUsage(*expected)


@pytest.mark.parametrize("number", ["1e999", "9" * 19, "9" * 400])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "input_tokens", "cache_read_input_tokens"])
def test_a_number_of_tokens_that_no_store_can_hold_is_none(name: str, number: str) -> None:
    usage = find_usage(b'{"usage":{"%b":%b}}' % (name.encode(), number.encode()))
    assert usage is None


@pytest.mark.parametrize(
    "said", [b"{}", b'{"prompt_tokens":0,"completion_tokens":0}', b'{"prompt_tokens":-5}', b"null"]
)
def test_a_usage_of_nothing_is_none(said: bytes) -> None:
    assert find_usage(b'{"choices":[{}],"usage":%b}' % said) is None
    assert find_usage(b'{"usage":{"prompt_tokens":3}}{"usage":%b}' % said) == TokenUsage(3, 0)
