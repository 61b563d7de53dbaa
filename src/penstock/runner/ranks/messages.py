"""What ranks say to each other beside collectives. Plain data: no rank runs what another has sent."""

from __future__ import annotations

import msgspec

from penstock.core.model_config import ModelConfig
from penstock.core.settings import EngineSettings


class RankSpec(msgspec.Struct, frozen=True):
    """What a follower's process is started with."""

    rank: int
    size: int
    control: int  # descriptor of its socket to the leader
    memory: int | None  # descriptor of the ranks' shared memory; None: they share none
    store: str  # address of the store by which devices meet; "": they need none
    model: str | ModelConfig  # its name; or a shape, which is filled with random weights
    engine: EngineSettings


# -- from a follower, while it starts


class Sized(msgspec.Struct, frozen=True, tag=True):
    """The blocks that a rank has room for."""

    num_blocks: int
    host_blocks: int
    staging_blocks: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """It runs what it is sent from now on."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sent by a thread of its own, as long as the process runs."""

    num_calls: int  # that it has made, of those it was told of


class FailedToStart(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str


FromFollower = Sized | Started | Alive | FailedToStart


# -- to all followers, in one order


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """The blocks that every rank has."""

    size: Sized


class RunStep(msgspec.Struct, frozen=True, tag=True):
    inputs: bytes  # see `StepInputs`


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Begin to read it; it is kept later, or not."""

    path: str
    digest: str


class KeepAdapter(msgspec.Struct, frozen=True, tag=True):
    digest: str


class ForgetAdapter(msgspec.Struct, frozen=True, tag=True):
    digest: str


class ClearSlot(msgspec.Struct, frozen=True, tag=True):
    slot: int


class EmbedTexts(msgspec.Struct, frozen=True, tag=True):
    texts: list[list[int]]


class ScoreTexts(msgspec.Struct, frozen=True, tag=True):
    texts: list[list[int]]
    scored: list[int]


class ParkMemory(msgspec.Struct, frozen=True, tag=True):
    pass


class WakeMemory(msgspec.Struct, frozen=True, tag=True):
    pass


ToFollower = (
    Agreed
    | RunStep
    | ReadAdapter
    | KeepAdapter
    | ForgetAdapter
    | ClearSlot
    | EmbedTexts
    | ScoreTexts
    | ParkMemory
    | WakeMemory
)
