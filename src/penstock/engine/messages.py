"""Everything that is said between a server and its engine process. One union per direction; msgpack on the wire.

`model` names the engine that a message is for or from, where several share a process; a single one has no name.
"""

from __future__ import annotations

import msgspec

from penstock.core.expert_load import ExpertLoad
from penstock.core.measurements import EngineMeasurements, ServingLimits
from penstock.core.parking import MemoryChange
from penstock.core.ranks import RankReading, RankReads
from penstock.core.request import Request, TokenEvent
from penstock.sched.cost import Work

# -- server to engine


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request
    model: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Have an adapter at hand, and requests for it may come. Answered when it has been read once."""

    digest: str
    path: str
    pinned: bool = False  # keep it on the device
    model: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Answered when the last request that runs with it has ended."""

    digest: str
    model: str = ""


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Whole texts, for one vector each; or, where `scored` says how many of each text's last tokens count, for the mean
    log probability of these; or, with `num_top`, for all tokens' log probabilities, as `core.token_logprobs` has them,
    with so many of the likeliest."""

    request_id: str
    texts: list[list[int]]
    scored: list[int] | None = None
    num_top: int | None = None
    model: str = ""


class Park(msgspec.Struct, frozen=True, tag=True):
    """Give the device's memory back as soon as nothing runs and nothing waits. Answered when that is done."""

    model: str = ""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Take the memory again; a park that was not done yet is called off. Answered when steps can run."""

    model: str = ""


class RebalanceExperts(msgspec.Struct, frozen=True, tag=True):
    """Place a mixture's experts anew, by what was counted. Answered when all ranks have theirs."""

    model: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop now. Requests that still run are dropped: draining is the server's part."""


ToEngine = Submit | Abort | Embed | LoadAdapter | UnloadAdapter | Park | Wake | RebalanceExperts | Stop
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

# -- engine to server


class EngineInfo(msgspec.Struct, frozen=True):
    """Settings as the engine resolved them: printed at start, shown by the server."""

    device: str
    number_format: str
    quant: str  # of linear weights: "none", or their number format
    kv_dtype: str
    kernels: str
    limits: ServingLimits
    kv_bytes: int
    state_bytes: int = 0  # size of one sequence's recurrent state on all ranks; 0: the model has none
    state_snapshots: int = 0  # number of snapshots of such states, for prompts with a common prefix
    host_blocks: int = 0  # more of them, in host memory
    host_tokens_per_s: float | None = None  # that come back from there; None: there are none
    disk_blocks: int = 0  # more of them, on disk
    routing_tokens: int = 0  # in a routing block; 0: it does not say what its cache holds
    startup_s: dict[str, float] = {}  # of its last start, phase by phase
    startup_cpu_s: dict[str, float] = {}  # processor time of the same phases
    began_s: float = 0.0  # when the first of them began, by the monotonic clock of the machine; 0: nobody says
    work: Work = Work()  # by which a step's time is split
    weight_bytes: int = 0  # read in every step
    kv_token_bytes: int = 0  # of one token in the cache
    read_bytes_per_s: float | None = None  # the most that was ever measured on such a device; None: nobody has
    device_name: str = ""  # as its driver calls it
    device_uuid: str = ""  # of a GPU
    generates: bool = True  # it answers with tokens
    embeds: bool = False  # it answers with vectors, and with scores if it generates too
    takes_images: bool = False  # prompts may have `Request.images`
    max_image_tokens: int = 0  # of one of them
    max_loras: int = 0  # adapters that have room on the device; 0: it cannot run any
    speculation: str = "off"  # what it guesses tokens with, in words
    can_park: bool = False  # its device's memory can be given back
    kv_port: int = 0  # at which other replicas pull KV blocks; 0: none do
    kv_layout: str = ""  # a digest of what two replicas must have in common for that
    kv_movers: tuple[str, ...] = ()  # how the bytes of blocks may move, the best first
    parallelism: tuple[str, ...] = ()  # of several ranks: how they share the model, in words, and why; (): there is one
    layout: str = ""  # of several ranks, in short: TP2 PP2
    rank_reads: tuple[RankReads, ...] = ()  # by rank; none: there is one, or nobody knows how large their weights are
    other_gpus: tuple[str, ...] = ()  # UUIDs of those that other ranks have, on this machine


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start-up."""

    phase: str
    done: int = 0
    total: int = 0
    model: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    model: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, and trying again will not help: the last message before it exits."""

    code: str
    message: str
    model: str = ""


class StepFigures(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The step that a report is of; all zero: it is of none."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_drafts: int = 0  # of `num_tokens`
    cost_s: float = 0.0  # without the time it waited for the step before
    price: float = 0.0  # seconds for a unit of work


class CacheChanges(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Routing blocks by where the cache holds them since now, and those that it no longer holds."""

    stored: list[int]
    removed: list[int]
    on_host: list[int]


class Charge(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Cost of a step for a request, where that is not one decode's share: see `sched.cost`."""

    request_id: str
    device_s: float
    kv_block_s: float


class StepReport(msgspec.Struct, frozen=True, gc=False, tag=True, omit_defaults=True):
    """The engine after a step."""

    events: list[TokenEvent]
    measured: EngineMeasurements = EngineMeasurements()
    step: StepFigures = StepFigures()
    cache: CacheChanges | None = None
    charges: list[Charge] = []
    model: str = ""


class AdapterAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answer to a load or an unload."""

    digest: str
    code: str = ""  # of the error, if it could not be done
    message: str = ""
    model: str = ""


class AdapterState(msgspec.Struct, frozen=True, tag=True):
    """Places of adapters, by digest. Counters run from the engine's start."""

    device: list[str] = []
    host: list[str] = []
    swaps: int = 0  # put onto the device
    reads: int = 0  # from disk
    model: str = ""


class ParkAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answer to a park or a wake."""

    is_parked: bool
    change: MemoryChange = MemoryChange()
    code: str = ""  # of the error, if it could not be done
    message: str = ""
    model: str = ""


class Embedded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All that was asked for, at once; or why not."""

    request_id: str
    values: bytes = b""  # float32, or rows of `core.token_logprobs`, text by text
    device_s: float = 0.0
    error: str | None = None
    model: str = ""


class RebalanceAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answer to a rebalancing. Imbalance is the busiest rank's tokens by the mean of all, of the tokens that it was
    planned for."""

    num_layers: int = 0  # whose experts were moved
    before: float = 1.0
    after: float = 1.0
    code: str = ""  # of the error, if it could not be done
    message: str = ""
    model: str = ""


class ExpertState(msgspec.Struct, frozen=True, tag=True):
    """Tokens of each expert of a mixture, every few seconds while some are routed."""

    load: ExpertLoad
    model: str = ""


class RankState(msgspec.Struct, frozen=True, tag=True):
    """Reading of one rank of the model, every few seconds, where there are several."""

    reading: RankReading
    model: str = ""


FromEngine = (
    RankState
    | ExpertState
    | Loading
    | Ready
    | Failed
    | StepReport
    | Embedded
    | AdapterAnswer
    | AdapterState
    | ParkAnswer
    | RebalanceAnswer
)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
