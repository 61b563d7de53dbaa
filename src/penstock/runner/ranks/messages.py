"""Messages between ranks beside collectives. Plain data: no rank runs what another has sent."""

from __future__ import annotations

import msgspec

from penstock.core.expert_load import LayerLoad
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import NodeMap
from penstock.core.parallelism import Parallelism
from penstock.core.ranks import RankUsage
from penstock.core.settings import EngineSettings
from penstock.sched.plan import Sampled


class Ways(msgspec.Struct, frozen=True):
    """Descriptors of what a rank shares with others of its host. None: there is nothing to share."""

    memory: int | None = None  # with the other ranks of its stage
    before: int | None = None  # a socket to its rank of the stage before
    after: int | None = None  # and of the one after

    @property
    def descriptors(self) -> list[int]:
        return [each for each in (self.memory, self.before, self.after) if each is not None]


class RankSpec(msgspec.Struct, frozen=True):
    """The argument of a follower's process."""

    rank: int
    parallelism: Parallelism
    control: int  # descriptor of its socket to the leader
    ways: Ways
    store: str  # address of the store by which devices meet; "": they need none
    nodes: NodeMap
    model: str | ModelConfig  # its name; or a shape, which is filled with random weights
    engine: EngineSettings


# -- from a follower, while it starts


class Sized(msgspec.Struct, frozen=True, tag=True):
    """The blocks that a rank has room for, and the number formats that it found best where nobody had said."""

    num_blocks: int
    host_blocks: int
    staging_blocks: int
    formats: str = ""
    placement: str = ""  # digest of which ranks have which experts


class CacheHandle(msgspec.Struct, frozen=True, tag=True):
    """The way to a rank's KV cache in host memory, for the leader on the same machine."""

    socket: str  # where the descriptor of its file is handed out
    nonce: bytes
    offsets: list[int]  # of its parts
    sizes: list[int]  # of a block in each of them
    num_blocks: int


class PoolHandle(msgspec.Struct, frozen=True, tag=True):
    """The way to a rank's KV cache on a GPU, for the leader on the same machine."""

    socket: str  # where the descriptor of its memory is handed out
    num_bytes: int  # of the physical memory
    shape: tuple[int, int, int]  # parts, blocks, bytes of a block's part


class Started(msgspec.Struct, frozen=True, tag=True):
    """It runs what it is sent from now on."""

    device: str = ""  # the UUID of its GPU; "": a CPU
    cache: CacheHandle | PoolHandle | None = None  # None: nobody else reaches it


class Woken(msgspec.Struct, frozen=True, tag=True):
    """Its memory is there again, after it was parked; sent where the leader had reached it."""

    cache: PoolHandle


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sent by a thread of its own, as long as the process runs."""

    num_calls: int  # that it has made, of those it was told of
    usage: RankUsage = RankUsage()
    num_parts: int = 0  # of texts, that it has computed: a long one is a long call
    experts: dict[int, LayerLoad] = {}  # of its stage's layers; from the first rank of each stage of a mixture


class Chosen(msgspec.Struct, frozen=True, tag=True):
    """The tokens of a step, by the last stage of a pipeline."""

    sampled: list[Sampled]


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """It has read its part of an adapter, or could not."""

    digest: str
    code: str = ""  # of the error; "": it can be kept
    message: str = ""


class Vectors(msgspec.Struct, frozen=True, tag=True):
    """Vectors of texts, or their tokens' log probabilities, by the last stage of a pipeline."""

    vectors: list[bytes]


class Scores(msgspec.Struct, frozen=True, tag=True):
    """Scores of texts, by the last stage of a pipeline."""

    scores: list[float]


class Lost(msgspec.Struct, frozen=True, tag=True):
    """It ends, for want of another rank."""

    rank: int
    why: str


class FailedToStart(msgspec.Struct, frozen=True, tag=True):
    """It ends, for want of something else: most often it has not started yet."""

    code: str
    message: str


FromFollower = Sized | Started | Woken | Alive | Chosen | AdapterRead | Vectors | Scores | Lost | FailedToStart
from_follower_decoder: msgspec.msgpack.Decoder[FromFollower] = msgspec.msgpack.Decoder(FromFollower)


# -- to all followers, in one order


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """The blocks that every rank has."""

    size: Sized
    word: bytes = b""  # by which the leader is known, when it asks for a rank's memory


class RunStep(msgspec.Struct, frozen=True, tag=True):
    inputs: bytes  # see `StepInputs`
    choices: bytes | None = None  # see `encode_choices`; None: this rank chooses no tokens


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Begin to read it, and say how that went; it is kept later, or forgotten."""

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
    num_top: int | None = None  # log probabilities of the tokens are wanted, with so many of the likeliest


class ScoreTexts(msgspec.Struct, frozen=True, tag=True):
    texts: list[list[int]]
    scored: list[int]


class PlaceExperts(msgspec.Struct, frozen=True, tag=True):
    layer: int
    ranks: list[list[int]]  # see `ExpertPlacement`


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
    | PlaceExperts
    | ParkMemory
    | WakeMemory
)
to_follower_decoder: msgspec.msgpack.Decoder[ToFollower] = msgspec.msgpack.Decoder(ToFollower)


# -- between nodes


class GroupIdentity(msgspec.Struct, frozen=True):
    """Properties that all nodes of a replica must have in common."""

    num_nodes: int
    parallelism: Parallelism  # the leader's counts: it has resolved what was auto
    asked: dict[str, int]  # tp, pp, ep and sp, where the settings have them
    config: str  # digest of the model's shape
    files: dict[str, str]  # digests of its weights, by name; none: they are random
    formats: dict[str, str]  # settings about number formats


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """A node's first word to the leader."""

    node: int
    port: int  # where it can be reached by nodes with an earlier stage's ranks
    identity: GroupIdentity


class RankHello(msgspec.Struct, frozen=True, tag=True):
    """The first word on what becomes a rank's connection to the leader."""

    session: str
    rank: int


class LinkHello(msgspec.Struct, frozen=True, tag=True):
    """The first word on what becomes the way from a rank to one of the next stage."""

    session: str
    sender: int


Hello = NodeHello | RankHello | LinkHello
hello_decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Hello`."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The other answer."""

    reason: str
    is_final: bool  # to try again is of no use


Answer = Welcome | Refusal
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Message of the leader to each node, once all are there: start your ranks."""

    session: str
    parallelism: Parallelism
    nodes: NodeMap
    ports: list[int]  # by node: where it can be reached
    store_port: int  # of the leader's store by which devices meet; 0: they need none
    engine: EngineSettings


begin_decoder = msgspec.msgpack.Decoder(Begin)


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Message of a node: the process of one of its ranks has ended."""

    rank: int
    status: int


class NodeAlive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a node, every now and then: also while its ranks load, and say nothing themselves."""


FromNode = RankEnded | NodeAlive
from_node_decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
