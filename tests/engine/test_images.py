"""Requests with images that an engine cannot take: each is refused by name, and changes nothing."""

from __future__ import annotations

import struct

import pytest
from msgspec.structs import replace

from penstock.core.images import ImageInput, image_tokens
from penstock.core.model_config import VisionConfig
from penstock.core.request import Request
from penstock.engine.engine import Engine
from penstock.engine.fake import FakeRunner
from penstock.engine.messages import StepReport, Submit
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.images import ImageSlots
from penstock.sched.scheduler import Scheduler

VISION = VisionConfig("idefics3", 32, 48, num_layers=1, num_heads=2, patch_size=4, merge_size=2, image_size=8)
IMAGE = ImageInput("2a" * 16, 1, 1, [1, 2, 2], [3, 8, 8], struct.pack("192f", *range(192)))
PROMPT = [5, *image_tokens(IMAGE.digest, 1), 6]


def engine(*, vision: VisionConfig | None = VISION, max_tokens: int = 8) -> Engine:
    images = ImageSlots(max_tokens, max_tokens)
    scheduler = Scheduler(KVCache(16, 4), StepBudget(16, target_s=None, floor=4), max_num_seqs=4, images=images)
    return Engine(scheduler, FakeRunner(16, 4), vision=vision)


def error_of(made: Engine, request: Request) -> str:
    made.receive([Submit(request)], 0.0)
    assert not made.scheduler.has_work
    (report,) = made.outbox
    assert isinstance(report, StepReport)
    (event,) = report.events
    assert event.error_code == "unsupported_parameter"
    assert event.error is not None
    return event.error


def test_an_image_that_fits_is_taken() -> None:
    made = engine()
    made.receive([Submit(Request("a", PROMPT, 2, images=(IMAGE,)))], 0.0)
    assert made.scheduler.num_waiting == 1


@pytest.mark.parametrize("made", [engine(vision=None), engine(max_tokens=0)], ids=["no encoder", "no room"])
def test_an_engine_without_an_encoder_takes_none(made: Engine) -> None:
    assert error_of(made, Request("a", PROMPT, 2, images=(IMAGE,))) == "this engine takes no images"


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (replace(IMAGE, num_tokens=9), "image 1 has 9 tokens; this engine takes up to 8"),
        (replace(IMAGE, values=b"1234"), "not what this model's encoder takes: it has 4 bytes"),
        (replace(IMAGE, start=2), "not where the prompt has their tokens"),
    ],
)
def test_an_image_that_is_not_as_it_should_be_is_refused(image: ImageInput, reason: str) -> None:
    assert reason in error_of(engine(), Request("a", PROMPT, 2, images=(image,)))
