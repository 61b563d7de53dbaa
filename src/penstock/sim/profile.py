"""A kind of replica, as a file: how long its steps take, how much it holds, how it is set. YAML, or one of the shipped.

name: h200-llama8b
cost: {step_s: 1.3e-3, weights_s: 3.7e-3, token_s: 22.3e-6, …}
kv_tokens: 600_000
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta

from penstock.core.config import build, nearest
from penstock.core.errors import ConfigError
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.settings import Count
from penstock.core.slo import Slo
from penstock.engine.step_log import StepShape
from penstock.sim.cost import Seconds, StepCost

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class Profile:
    name: str
    cost: StepCost
    kv_tokens: Count
    max_sequences: Count = 256
    chunk_tokens: Count = 8192  # most in a step
    max_context_tokens: Count = 131_072
    block_tokens: Count = ROUTING_TOKENS  # of a KV block: the coarser, the faster to simulate
    kv_token_bytes: Count = 131_072  # of keys and values, that go from one replica to another
    host_kv_tokens: Annotated[int, Meta(ge=0)] = 0  # more of the cache, in host memory
    host_tokens_per_s: Annotated[float, Meta(gt=0)] = 200_000.0  # there and back
    overlaps: bool = True  # a step is planned while the one before it runs, as on a GPU
    devices: Count = 1  # of all ranks
    stages: Count = 1  # of a pipeline: as many steps are under way, each of which takes its time in all of them
    request_s: Seconds = 0.001  # from the gateway to the engine: HTTP, parsing, tokens
    slo: Slo = field(default_factory=Slo)
    source: Annotated[str, Meta(max_length=1000)] = ""  # where the numbers come from

    def __post_init__(self) -> None:
        if ROUTING_TOKENS % self.block_tokens:
            raise ConfigError(
                f"block_tokens is {self.block_tokens}: it must divide {ROUTING_TOKENS}, a routing block",
                param="block_tokens",
            )
        if self.devices % self.stages:
            raise ConfigError(
                f"{self.devices} devices cannot be shared out among {self.stages} stages evenly", param="devices"
            )

    def work_s(self, shape: StepShape) -> float:
        """Seconds of a replica that a step's content takes, if it is never idle: a pipeline has several at once."""
        return self.cost.work_s(shape) / self.stages

    def request_work_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The same of a whole request of which nothing is in the cache."""
        return self.cost.request_s(prompt_tokens, output_tokens) / self.stages

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_token_bytes

    @property
    def host_blocks(self) -> int:
        return self.host_kv_tokens // self.block_tokens

    @property
    def copy_s(self) -> float:
        """The seconds that a block takes to host memory and back."""
        return self.block_tokens / self.host_tokens_per_s

    def copying_s(self, copies: Sequence[tuple[int, int]]) -> float:
        """Returns the seconds of the copies that begin or end in host memory, whose blocks come after the device's."""
        return sum(max(pair) >= self.num_blocks for pair in copies) * self.copy_s / 2


def shipped_profiles() -> list[str]:
    folder = resources.files("penstock.sim").joinpath("profiles")
    return sorted(entry.name.removesuffix(_SUFFIX) for entry in folder.iterdir() if entry.name.endswith(_SUFFIX))


def load_profile(name: str) -> Profile:
    """A file, or the name of a shipped one."""
    if Path(name).is_file():
        return read_profile(Path(name).read_text(), where=name)
    if name not in shipped_profiles():
        hint = nearest(name, shipped_profiles())
        suggestion = f"; did you mean '{hint}'?" if hint else f"; shipped: {', '.join(shipped_profiles())}"
        raise ConfigError(f"no profile '{name}', and no such file{suggestion}", param="profile")
    text = resources.files("penstock.sim").joinpath("profiles", name + _SUFFIX).read_text()
    return read_profile(text, where=name)


def read_profile(text: str, *, where: str) -> Profile:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no profile: it holds no settings")
    return build(Profile, values)


def write_profile(profile: Profile) -> str:
    values: dict[str, Any] = dataclasses.asdict(profile)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
