"""The table of GPUs: what they can do and what they cost. It ships as hardware.toml; a user's file goes over it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Annotated, Any

from msgspec import Meta

from penstock.capacity.formats import Formats
from penstock.core.config import build, nearest
from penstock.core.errors import ConfigError

Positive = Annotated[float, Meta(gt=0)]

# Between GPUs that have no link of their own: PCIe 4 with 16 lanes, one direction, and an all-reduce of a few KB
# (assumed, as for the GPUs of hardware.toml that have nothing else).
PCIE, PCIE_GB_S, PCIE_LATENCY_US = "PCIe", 32.0, 30.0


@dataclass(frozen=True)
class Network:
    """A way between nodes. Bandwidth is of one adapter, in one direction."""

    name: str
    gb_s: float
    latency_us: float  # of a message, or an all-reduce of a few KB, between a GPU and one of another node
    is_shared: bool = False  # the GPUs of a node have one adapter together, and not one each


# InfiniBand: a small all-reduce of two GPUs of two nodes was published as 19 to 20 us (NVIDIA/nccl-tests #150), and NDR
# adapters as 46 to 48 GB/s of their 50 (NVIDIA/nccl-tests #290). Ethernet: assumed, as TCP through the host.
NETWORKS = {
    "ib400": Network("InfiniBand 400 Gb/s", gb_s=50.0, latency_us=20.0),
    "100gbe": Network("100 GbE", gb_s=12.5, latency_us=60.0, is_shared=True),
}


@dataclass(frozen=True)
class Peaks:
    """The peaks that a device reached under the best program for it: the roof over every figure of a bench."""

    bandwidth_tb_s: Positive
    tflops: dict[str, Positive]

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_tb_s * 1e12

    @property
    def flops_per_s(self) -> dict[str, float]:
        return {name: figure * 1e12 for name, figure in self.tflops.items()}


@dataclass(frozen=True)
class Gpu:
    """One entry of the table; hardware.toml says what each figure is."""

    name: str  # as its driver calls it
    price_per_hour: Positive
    memory_gib: Positive
    bandwidth_tb_s: Positive
    tflops: dict[str, Positive]
    link_gb_s: Positive
    link_latency_us: Annotated[float, Meta(ge=0)]
    network_gb_s: Positive
    per_node: Annotated[int, Meta(ge=1)]
    network_latency_us: Annotated[float, Meta(ge=0)] = 20.0
    shares_network: bool = False
    link: str = PCIE
    network: str = ""
    measured: Peaks | None = None

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_tb_s * 1e12

    def over_pcie(self) -> Gpu:
        """The same GPU in a machine that joins its GPUs by PCIe alone."""
        return replace(
            self,
            link=PCIE,
            link_gb_s=min(self.link_gb_s, PCIE_GB_S),
            link_latency_us=max(self.link_latency_us, PCIE_LATENCY_US),
        )

    def over(self, network: Network) -> Gpu:
        """The same GPU in nodes that this network joins."""
        return replace(
            self,
            network=network.name,
            network_gb_s=network.gb_s,
            network_latency_us=network.latency_us,
            shares_network=network.is_shared,
        )

    @property
    def network_name(self) -> str:
        return self.network or f"{8 * self.network_gb_s:g} Gb/s network"

    def supports(self, formats: Formats) -> bool:
        """8-bit floats are for GPUs that have them; what else a GPU does not have it widens."""
        return "fp8" in self.tflops or "fp8" not in (formats.weights, formats.kv)

    def flops_per_s(self, number_format: str) -> float:
        return self.tflops[number_format] * 1e12


Table = dict[str, Gpu]


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("penstock.capacity").joinpath("hardware.toml").read_text())


def hardware(own: str | None = None, *, where: str = "the hardware file") -> Table:
    """The shipped table, under the text of the user's file where there is one."""
    entries = {name: dict(entry) for name, entry in _shipped().items()}
    for name, entry in _parse(own, where).items():
        entries[name] = {**entries.get(name, {}), **entry}
    try:
        return {name: _gpu(name, entry) for name, entry in entries.items()}
    except ConfigError as error:  # the shipped table is right
        raise ConfigError(
            f"{_place(own or '', where, error.param or '')}: {error.message}", param=error.param
        ) from None


def find_gpu(table: Mapping[str, Gpu], name: str) -> Gpu:
    if name not in table:
        hint = nearest(name.lower(), table)
        raise ConfigError(
            f"no GPU {name!r}" + (f"; did you mean {hint!r}?" if hint else ".") + f" There are {', '.join(table)}; "
            "--hardware FILE adds one",
            param="gpu",
        )
    return table[name]


def by_driver_name(name: str) -> Gpu | None:
    return next((gpu for gpu in hardware().values() if gpu.name == name), None)


def _gpu(name: str, entry: Mapping[str, Any]) -> Gpu:
    gpu = build(Gpu, entry, where=f"{name}.")
    if "bfloat16" not in gpu.tflops:
        raise ConfigError(
            f"'{name}.tflops' needs bfloat16, the format that all others are widened to", param=f"{name}.tflops"
        )
    return gpu


def _place(text: str, where: str, name: str) -> str:
    """FILE:LINE of a key of a TOML text, or of the table that it should be in."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, _ = line.partition("=")
        if line.lstrip().startswith("["):
            key = table = line.strip(" []")
        elif equals:
            key = ".".join(filter(None, (table, key.strip())))
        lines.setdefault(key, number)
        lines.setdefault(key.partition(".")[0], number)
    while name and name not in lines:
        name = name.rpartition(".")[0]
    return f"{where}:{lines[name]}" if name else where


def _parse(text: str | None, where: str) -> dict[str, dict[str, Any]]:
    if text is None:
        return {}
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from None
    if not all(isinstance(entry, dict) for entry in document.values()):
        raise ConfigError(
            f"{where} does not hold GPUs by name, each with its figures; see `penstock plan --list-hardware`"
        )
    return document
