from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from penstock.core.errors import ConfigError
from penstock.quant.data import windows
from penstock.quant.texts import text
from penstock.text.tokenizer import Tokenizer

WORDS = 5000


def tokenizer(*, bos: bool) -> Tokenizer:
    """A word is a token, and its number its id."""
    backend = tokenizers.Tokenizer(models.WordLevel({**{str(i): i for i in range(WORDS)}, "<s>": WORDS}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", WORDS)])
    return Tokenizer(backend, {"bos_token": "<s>"})


COUNTED = " ".join(map(str, range(WORDS)))


def test_windows_are_spread_over_the_text_and_do_not_overlap() -> None:
    found = windows(COUNTED, tokenizer(bos=False), 100, most=8)
    assert found.shape == (8, 100)
    assert found[0].tolist() == list(range(100))
    assert found[-1, -1] == WORDS - 1
    assert (found[1:, 0] > found[:-1, -1]).all()


def test_every_window_begins_as_a_prompt_does() -> None:
    found = windows(COUNTED, tokenizer(bos=True), 100, most=8)
    assert (found[:, 0] == WORDS).all()
    assert found[0, 1:].tolist() == list(range(99))


def test_a_wish_for_windows_is_met_or_refused() -> None:
    assert windows(COUNTED, tokenizer(bos=False), 100, most=8, wanted=50).shape == (50, 100)
    with pytest.raises(ConfigError, match="50 windows of 100, not 51"):
        windows(COUNTED, tokenizer(bos=False), 100, most=8, wanted=51)


def test_a_text_that_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short: it has 3 tokens"):
        windows("1 2 3", tokenizer(bos=False), 100, most=64)
    with pytest.raises(ConfigError, match="3 windows of 100 tokens are too few"):
        windows(COUNTED, tokenizer(bos=False), 100, most=64, wanted=3)
    with pytest.raises(ConfigError, match="windows of 2 tokens are too short"):
        windows(COUNTED, tokenizer(bos=True), 2, most=64)


def test_the_text_to_judge_by_is_not_the_one_to_fit_to() -> None:
    calibration, evaluation = text("calibration"), text("evaluation")
    assert len(calibration) > 100_000
    assert len(evaluation) > 40_000
    lines = {line for line in calibration.splitlines() if len(line) > 30}
    assert not lines & set(evaluation.splitlines())
