"""Drafts for several adapters and for the base model in one step: what each would get without drafts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.hub.peft import read_peft
from penstock.runner.assemble import Assembly
from tests.devices import NEEDS_GPU
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import assembled
from tests.runner.guessing import Eager, Recalling
from tests.runner.test_cuda_adapters import CONFIG, adapters, requests

__all__ = ["adapters"]  # the fixture


@pytest.fixture(params=[pytest.param("cpu-overlapped", marks=pytest.mark.slow), pytest.param("cuda", marks=NEEDS_GPU)])
def assembly(request: pytest.FixtureRequest, adapters: list[Path]) -> Assembly:
    made = assembled(CONFIG, request.param, block_size=16, max_loras=len(adapters), speculate="ngram")
    assert made.adapters is not None
    for path in adapters:
        made.adapters.keep(made.adapters.read(str(path), read_peft(path).digest))
    return made


def test_each_gets_what_it_would_get_without(assembly: Assembly, adapters: list[Path]) -> None:
    asked = [msgspec.structs.replace(request, max_tokens=40) for request in requests(adapters, 10)]
    plain = Clients(one_after_the_other(asked, apart=1))
    serve(assembly, plain, num_blocks=200)
    answers = {name: answer.token_ids for name, answer in plain.finished.items()}
    guess = Eager(Recalling(answers, 0.8, CONFIG.vocab_size), most=4)
    clients = Clients(one_after_the_other(asked, apart=1))
    serve(assembly, clients, num_blocks=200, speculate=lambda cache: guess)
    assert clients.measured.speculation.drafted_tokens > clients.measured.speculation.accepted_tokens > 20
    same = sum(answers[name] == answer.token_ids for name, answer in clients.finished.items())
    assert same >= len(asked) - 1, "where two tokens are as likely as each other, one may differ"
