"""What is noted of requests for tensors: log lines of those that are worth one, and what listeners are told."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.core.errors import Overloaded
from penstock.server.recorder import Finished, TextWork
from penstock.tensors.recorder import TensorRecorder
from tests.clocks import ManualClock


@pytest.fixture
def recorder() -> TensorRecorder:
    return TensorRecorder(ManualClock(), "classifier")


def test_answers_of_tensors_are_logged_at_debug_and_all_else_at_info(
    recorder: TensorRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "penstock.request")
    with recorder.request("infer"):
        pass
    with pytest.raises(Overloaded), recorder.request("infer"):
        raise Overloaded("full")
    with recorder.request("embeddings", "e-1") as record:
        record.texts = TextWork(1, 3, "", "classifier")
    found = [(one.levelname, one.getMessage().rpartition(" ")[0]) for one in caplog.records]
    assert found == [
        ("DEBUG", "id=- route=infer outcome=ok"),
        ("INFO", "id=- route=infer outcome=overloaded"),
        ("INFO", "id=e-1 route=embeddings outcome=ok"),
    ]


def test_listeners_are_told_how_each_request_ended_by_an_id_of_its_own(recorder: TensorRecorder) -> None:
    told: list[Finished] = []
    recorder.listeners.append(told.append)
    with recorder.request("infer", model="classifier"):
        pass
    with pytest.raises(asyncio.CancelledError), recorder.request("infer"):
        raise asyncio.CancelledError
    with pytest.raises(KeyError), recorder.request("infer"):
        raise KeyError
    assert [(one.id, one.status, one.outcome) for one in told] == [
        ("infer-1", 200, "ok"),
        ("infer-2", 500, "cancelled"),
        ("infer-3", 500, "internal_error"),
    ]
    assert {one.model for one in told} == {"classifier"}
