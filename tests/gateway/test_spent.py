import pytest

from penstock.gateway.spent import TokenUsage, find_usage


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
