"""Models that are served: requests, batches and instances in one loop, with a real ONNX Runtime where it matters."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import EngineFailed, EngineUnavailable, InvalidRequest, ModelNotFound, Overloaded
from penstock.tensors import loading
from penstock.tensors.batcher import BatchingRules, QueuePolicy
from penstock.tensors.instances import MAX_SLOW, QUICK_S, Instance
from penstock.tensors.model_settings import ModelSettings, settings_of
from penstock.tensors.repository import ModelDirectory
from penstock.tensors.served_model import Inference, ServedModel, ServedVersion
from penstock.tensors.signature import Signature, TensorSpec
from tests.clocks import ManualClock
from tests.tensors.models import classify, save_classifier, save_lookup


class Doubler:
    """A session that waits to be let go, and notes what it was given."""

    device = "cpu"

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.batches: list[list[float]] = []

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        self.may_go.wait(60)
        self.batches.append(inputs["x"][:, 0].tolist())
        if np.isnan(inputs["x"]).any():
            raise RuntimeError("not a number")
        return [2 * inputs["x"]]


def _version(clock: ManualClock, session: Doubler, **rules: Any) -> ServedVersion:
    most = rules.setdefault("max_batch_size", 4)
    spec = TensorSpec("x", "FP32", (1,))
    signature = Signature((spec,), (TensorSpec("y", "FP32", (1,)),), most)
    instance = Instance("test", session, is_batched=True)
    return ServedVersion("m", 1, ModelSettings(), signature, BatchingRules(**rules), [instance], clock=clock)


def _asked(*values: float, **more: Any) -> Inference:
    return Inference({"x": np.array([[value] for value in values], np.float32)}, **more)


async def _begun(version: ServedVersion, value: float) -> asyncio.Future[Any]:
    """A request that the batcher has looked at by itself: without a delay an idle instance has begun it."""
    asked = asyncio.ensure_future(version.infer(_asked(value)))
    await asyncio.sleep(0)  # it is in the queue
    await asyncio.sleep(0)  # and out of it again
    return asked


async def _seen(found: Any) -> float:
    return float((await found)["y"][0, 0])


async def test_requests_that_arrive_in_one_turn_of_the_loop_go_together() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    assert await asyncio.gather(*(_seen(version.infer(_asked(value))) for value in (1, 2, 3))) == [2, 4, 6]
    assert session.batches == [[1, 2, 3]]


async def test_requests_that_wait_for_an_instance_go_together() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    session.may_go.clear()
    asked = [await _begun(version, 1)]
    asked += [asyncio.ensure_future(version.infer(_asked(value))) for value in (2, 3)]
    await asyncio.sleep(0)
    assert (version.num_open, version.num_waiting) == (3, 2)
    session.may_go.set()
    assert [await _seen(one) for one in asked] == [2, 4, 6]
    assert session.batches == [[1], [2, 3]]
    assert version.statistics.inferences == 3
    assert version.statistics.executions == 2
    assert version.num_open == 0


async def test_delay_is_waited_for_and_ends_early_where_the_batch_is_full() -> None:
    session, clock = Doubler(), ManualClock()
    version = _version(clock, session, max_queue_delay_s=0.25)
    first = await _begun(version, 1)
    assert clock.waits_s == [0.25]
    clock.advance(0.25)
    assert await _seen(first) == 2
    asked = [asyncio.ensure_future(version.infer(_asked(value))) for value in (1, 2, 3, 4)]
    assert [await _seen(one) for one in asked] == [2, 4, 6, 8]
    assert session.batches == [[1], [1, 2, 3, 4]]


async def test_request_that_waited_too_long_is_refused() -> None:
    session, clock = Doubler(), ManualClock()
    version = _version(clock, session)
    session.may_go.clear()
    first = await _begun(version, 1)
    late = asyncio.ensure_future(version.infer(_asked(2, timeout_s=0.5)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.advance(0.5)
    with pytest.raises(Overloaded) as refused:
        await late
    assert refused.value.reason == "queue_timeout"
    session.may_go.set()
    assert await _seen(first) == 2
    assert session.batches == [[1]]
    assert version.statistics.fail.count == 1


async def test_full_queue_refuses_with_a_time_to_come_back() -> None:
    session = Doubler()
    version = _version(ManualClock(), session, policy=QueuePolicy(1))
    session.may_go.clear()
    asked = [await _begun(version, 1), asyncio.ensure_future(version.infer(_asked(2)))]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await version.infer(_asked(3))
    assert refused.value.retry_after_s is not None
    session.may_go.set()
    assert [await _seen(one) for one in asked] == [2, 4]


async def test_client_that_leaves_is_not_computed_for() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    session.may_go.clear()
    first = await _begun(version, 1)
    gone = asyncio.ensure_future(version.infer(_asked(2)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert version.num_open == 1
    session.may_go.set()
    await first
    assert session.batches == [[1]]


async def test_request_that_the_model_fails_on_fails_alone() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    session.may_go.clear()
    asked = [await _begun(version, 1)]
    asked += [asyncio.ensure_future(version.infer(_asked(value))) for value in (2, float("nan"), 3)]
    await asyncio.sleep(0)
    session.may_go.set()
    assert await _seen(asked[0]) == 2
    assert [await _seen(asked[1]), await _seen(asked[3])] == [4, 6]
    with pytest.raises(EngineFailed):
        await asked[2]
    assert len(session.batches) == 5  # the first, the other three, and each of them by itself


async def test_stop_refuses_what_waits_and_what_comes() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    session.may_go.clear()
    first, second = await _begun(version, 1), asyncio.ensure_future(version.infer(_asked(2)))
    await asyncio.sleep(0)
    version.stop()
    session.may_go.set()
    with pytest.raises(EngineUnavailable):
        await second
    with pytest.raises(EngineUnavailable):
        await version.infer(_asked(3))
    assert await _seen(first) == 2


def _served(directory: ModelDirectory) -> ServedModel:
    return loading.serve(directory.name, loading.load(directory), ManualClock())


async def test_real_model_computes_batches_of_requests(classifier: Path) -> None:
    settings = settings_of(
        {
            "instance_group": [{"count": 2}],
            "model_warmup": [
                {
                    "name": "one",
                    "batch_size": 2,
                    "inputs": {"x": {"data_type": "TYPE_FP32", "dims": [4], "zero_data": True}},
                }
            ],
        },
        "test",
    )
    model = _served(ModelDirectory("m", settings, {1: classifier}, classifier.parent))
    rows = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    found = await asyncio.gather(*(model.latest.infer(Inference({"x": row[None]})) for row in rows))
    assert np.allclose(np.concatenate([one["probabilities"] for one in found]), classify(rows), atol=1e-6)
    assert len(model.latest.instances) == 2
    for wrong, why in (
        ({}, "is missing"),
        ({"y": rows}, "no input of this model"),
        ({"x": rows.astype(np.float64)}, "takes FP32"),
        ({"x": rows[:, :3]}, "takes \\[-1, 4\\]"),
        ({"x": rows[0]}, "takes \\[-1, 4\\]"),
        ({"x": np.zeros((33, 4), np.float32)}, "1 to 32"),
        ({"x": np.zeros((0, 4), np.float32)}, "1 to 32"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            await model.latest.infer(Inference(wrong))
    with pytest.raises(ModelNotFound, match="no version '7'; it has 1"):
        model.find("7")
    model.stop()


async def test_values_that_a_model_cannot_take_are_the_request_s_fault(tmp_path: Path) -> None:
    model = _served(ModelDirectory("m", ModelSettings(), {1: save_lookup(tmp_path / "m.onnx")}, tmp_path))
    good, bad = np.array([[1, 2]]), np.array([[1, 99]])
    version = model.latest
    found = await asyncio.gather(
        *(version.infer(Inference({"ids": ids})) for ids in (good, bad, good)), return_exceptions=True
    )
    assert isinstance(found[1], InvalidRequest)
    for one in (found[0], found[2]):
        assert isinstance(one, dict)
        assert one["found"].tolist() == [[[2, 3], [4, 5]]]
    model.stop()


async def test_model_with_a_fixed_batch_is_executed_request_by_request(tmp_path: Path) -> None:
    path = save_classifier(tmp_path / "m.onnx", batch=1)
    model = _served(ModelDirectory("m", ModelSettings(), {1: path}, tmp_path))
    assert model.latest.signature.max_batch_size == 0
    rows = np.ones((1, 4), np.float32)
    found = await asyncio.gather(*(model.latest.infer(Inference({"x": rows})) for _ in range(3)))
    assert all(np.allclose(one["probabilities"], classify(rows)) for one in found)
    assert model.latest.statistics.executions == 3
    model.stop()


async def test_quick_model_computes_in_the_loop_what_came_together() -> None:
    session = Doubler()
    version = _version(ManualClock(), session, policy=QueuePolicy(2))
    (instance,) = version.instances
    instance.is_quick = True
    asked = [asyncio.ensure_future(version.infer(_asked(value))) for value in range(1, 7)]
    assert [await _seen(one) for one in asked] == [2, 4, 6, 8, 10, 12]
    assert session.batches == [[1, 2], [3, 4], [5, 6]]  # the queue holds two: then they are computed at once
    assert (version.num_open, version.num_waiting) == (0, 0)


async def test_model_that_is_slow_in_the_loop_goes_to_its_thread() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    (instance,) = version.instances
    instance.is_quick = True
    slow = threading.Event()
    session.may_go = slow
    threads: set[str] = set()

    def wait(_: float) -> bool:
        threads.add(threading.current_thread().name)
        return time.sleep(2 * QUICK_S) is None

    slow.wait = wait  # type: ignore[method-assign,assignment]
    for _ in range(MAX_SLOW + 1):
        assert await _seen(version.infer(_asked(1))) == 2
    assert not instance.is_quick
    assert threads == {"test", threading.current_thread().name}
    version.stop()


async def test_model_that_is_loaded_anew_ends_what_it_has_begun() -> None:
    session = Doubler()
    version = _version(ManualClock(), session)
    session.may_go.clear()
    asked = [asyncio.ensure_future(version.infer(_asked(value))) for value in (1, 2)]
    await asyncio.sleep(0)
    retiring = asyncio.ensure_future(version.retire())
    await asyncio.sleep(0)
    assert not retiring.done()
    session.may_go.set()
    assert [await _seen(one) for one in asked] == [2, 4]
    await retiring
    with pytest.raises(EngineUnavailable):
        await version.infer(_asked(3))
