"""A decoder's layer with its linears in the open: each still knows its weight, and may be given another where it is.

A layer of any family runs at any time, as it is by then. This module knows what its parts are called in files; not how
weights get small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.model_config import Activation, ModelConfig
from penstock.hub.families import FAMILY_FILES, ExpertNames
from penstock.model.families.gemma2 import GemmaLayer
from penstock.model.layers import MLP, Attention, DecoderLayer
from penstock.model.ops import Norm
from penstock.model.ops.experts import HostExperts
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized import Weight, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.sparse import SparseLayer, SparseMLP
from penstock.model.weights import Site
from penstock.quant import e4m3, integers


class KeptLinear:
    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.become(weight)

    def become(self, weight: Weight) -> None:
        self.weight = weight
        self.wide = plain(weight).float()  # what the weight stands for

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(as_met(self.weight, x), self.wide, self.bias)


class KeepingOps(ReferenceOps):
    def linear(self, weight: Weight, bias: Tensor | None = None, *, precise: bool = True) -> KeptLinear:
        return KeptLinear(weight, None if bias is None else bias.float())


def kept(linear: object) -> KeptLinear:
    """One of a layer that was loaded with such operations."""
    assert isinstance(linear, KeptLinear)
    return linear


def as_met(weight: Weight, x: Tensor) -> Tensor:
    """Activations as this weight meets them: rounded too, row by row, in the formats that do."""
    if isinstance(weight, Int8Weight):
        return integers.by_row(x).dequantized()
    return e4m3.quantized(x).dequantized() if isinstance(weight, Fp8Weight) else x


@dataclass(frozen=True)
class Expert:
    gate_up: KeptLinear
    down: KeptLinear


@dataclass(frozen=True)
class OpenLayer:
    layer: DecoderLayer | GemmaLayer | SparseLayer
    config: ModelConfig
    prefix: str  # of its names in files
    sites: list[Site]  # the linears that are to be small, but for experts'

    @property
    def attention(self) -> Attention:
        return self.layer.attention

    @property
    def mlp(self) -> MLP | SparseMLP:
        return self.layer.mlp

    @property
    def activation(self) -> Activation:
        return self.config.activation

    @property
    def attention_end(self) -> Norm | None:
        """Norm of the attention's output before it is added; None: it is added as it is."""
        return self.layer.attention_end if isinstance(self.layer, GemmaLayer) else None

    @property
    def mlp_end(self) -> Norm | None:
        return self.layer.mlp_end if isinstance(self.layer, GemmaLayer) else None

    @property
    def norms(self) -> dict[str, Norm]:
        """Norms before linears, by their names in files. Norms after linears, or within them, never change."""
        before_mlp = self.layer.mlp_norm if isinstance(self.layer, GemmaLayer) else "post_attention_layernorm"
        return {
            f"{self.prefix}input_layernorm.weight": self.attention.norm,
            f"{self.prefix}{before_mlp}.weight": self.mlp.norm,
        }

    @property
    def routers(self) -> dict[str, KeptLinear]:
        """The linears that are never quantized: they are small, and who is chosen may hang on their last bits."""
        mlp = self.mlp
        if not isinstance(mlp, SparseMLP):
            return {}
        at = f"{self.prefix}{self._expert_names.block}"
        shared = {} if mlp.shared is None else {f"{at}.shared_expert_gate.weight": kept(mlp.shared.gate)}
        return {f"{at}.gate.weight": kept(mlp.router), **shared}

    @property
    def experts(self) -> list[Expert]:
        if not isinstance(self.mlp, SparseMLP):
            return []
        assert isinstance(self.mlp.experts, HostExperts)
        return [Expert(kept(gate_up), kept(down)) for gate_up, down in self.mlp.experts.linears]

    def linears(self) -> Iterator[Site]:
        """All that are to be small, and what they are called."""
        yield from self.sites
        for number, expert in enumerate(self.experts):
            names, at = self._expert_names, self.expert_name(number)
            width, hidden = expert.down.wide.shape[1], expert.down.wide.shape[0]
            yield Site(expert.gate_up, {f"{at}.{names.gate}": width, f"{at}.{names.up}": width}, hidden)
            yield Site(expert.down, {f"{at}.{names.down}": hidden}, width)

    def expert_name(self, number: int) -> str:
        return f"{self.prefix}{self._expert_names.block}.experts.{number}"

    def narrow_routers(self, dtype: torch.dtype) -> None:
        """Rounds the routers as they will be stored."""
        for router in self.routers.values():
            router.become(router.wide.to(dtype).float())

    @property
    def _expert_names(self) -> ExpertNames:
        names = FAMILY_FILES[self.config.architecture].experts
        assert names is not None
        return names
