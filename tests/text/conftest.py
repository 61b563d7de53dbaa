from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.sources import pull
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return pull("smollm2", progress=lambda *_: None)


@pytest.fixture(scope="session")
def smollm2_source(smollm2_file: Path) -> TokenizerMetadata:
    return GGUFCheckpoint(smollm2_file).tokenizer_source


@pytest.fixture(scope="session")
def smollm2(smollm2_source: TokenizerMetadata) -> Tokenizer:
    return Tokenizer.load(smollm2_source)
