"""A model in parts, each on its rank, says what the whole model says: every family, stored formats, adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import LlamaConfig

from penstock.core.errors import ModelUnsupported
from penstock.core.expert_placement import ExpertSharing
from penstock.core.model_config import ModelConfig
from penstock.hub import gguf_file
from penstock.hub.checkpoint import Checkpoint, stored_part
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.peft import read_peft
from penstock.hub.stored import Part, StoredTensor
from penstock.model.batch import SlotRows
from penstock.model.expert_layers import ExpertLayers
from penstock.model.families import FAMILIES as SERVED
from penstock.model.layers import CausalLM, Decoder, DecoderLayer
from penstock.model.loading import load_model
from penstock.model.lora import with_adapters
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import Ranks
from penstock.model.shard import Shard
from penstock.model.weights import Site
from penstock.quant import to_quant
from tests.hub import fp8_checkpoints
from tests.hub.families import SHAPE as HF_SHAPE
from tests.hub.families import random_model, tensors_of, write_gguf
from tests.hub.integer_checkpoints import LAYOUTS, write_integers
from tests.model.family_configs import CONFIGS, MORE_CONFIGS, SHAPE
from tests.model.lora import write_adapter
from tests.model.paged import PagedDriver, make_batch, with_states
from tests.model.ranks import ThreadRanks, on_every_rank
from tests.model.tiny import ArrayCheckpoint

PROMPT = list(range(3, 40))
FAMILIES: dict[str, ModelConfig] = {
    "llama": replace(SHAPE, vocab_size=398),  # which two ranks share evenly, and four do not
    "llama, tied and biased": replace(SHAPE, tied_embeddings=True, attention_bias=True, output_bias=True),
    "mistral": replace(SHAPE, architecture="mistral", windows=(10, 10)),
    "qwen2": replace(SHAPE, architecture="qwen2", attention_bias=True),
    "qwen3": replace(SHAPE, architecture="qwen3", tied_embeddings=True),
    **CONFIGS,
    **MORE_CONFIGS,
}
# What these bring is also in others.
SLOW = {"glm4", "granite-moe", "olmo2", "olmoe", "exaone4", "ministral3", *MORE_CONFIGS}
PARAMS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in FAMILIES]
FOUR_RANKS = LlamaConfig(**(HF_SHAPE | {"hidden_size": 128, "intermediate_size": 512}), max_position_embeddings=64)
TWO_RANKS = LlamaConfig(**(HF_SHAPE | {"intermediate_size": 128}), max_position_embeddings=64)  # of whole groups of 32

Load = Callable[[Ops, Ranks | None], CausalLM]


def says(load: Load, ranks: Ranks | None = None, ops: Ops | None = None) -> Tensor:
    """Logits of every token: a prompt in two chunks, so that the cache is read as well."""
    ops = ops or ReferenceOps()
    shard = ranks.shard if ranks is not None else Shard()
    return PagedDriver(load(ops, ranks), ops, block_size=4, tokens=shard.tokens, shard=shard).prefill(PROMPT, chunk=30)


def loads(checkpoint: Checkpoint) -> Load:
    return lambda ops, ranks: load_model(checkpoint, ops, ranks=ranks)


@cache
def family_loads(family: str) -> Load:
    return loads(RandomCheckpoint(FAMILIES[family]))


@cache
def whole_says(load: Load, make_ops: Callable[[], Ops]) -> Tensor:
    return says(load, ops=make_ops())


def assert_the_same(load: Load, size: int, make_ops: Callable[[], Ops] = ReferenceOps, sp: int = 1) -> None:
    for logits in on_every_rank(size, lambda ranks: says(load, ranks, make_ops()), sp):
        torch.testing.assert_close(logits, whole_says(load, make_ops), rtol=2e-4, atol=2e-4)


def test_every_family_that_is_served_is_among_them() -> None:
    assert {config.architecture for config in FAMILIES.values()} == set(SERVED)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", PARAMS)
def test_every_family_says_the_same_in_parts(family: str, size: int) -> None:
    assert_the_same(family_loads(family), size)


@pytest.mark.parametrize(
    ("size", "sp", "make_ops"),
    [
        pytest.param(2, 2, ReferenceOps, id="2-2-reference"),
        pytest.param(4, 4, ReferenceOps, id="4-4-reference"),
        pytest.param(4, 2, lambda: native_ops(), id="4-2-native"),
    ],
)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in MORE_CONFIGS else [])
        for name, config in FAMILIES.items()
        if config.latent is None and config.linear is None
    ],
)
def test_every_family_says_the_same_where_ranks_share_out_tokens(
    family: str, size: int, sp: int, make_ops: Callable[[], Ops]
) -> None:
    """Windows, caps and norms of heads included; with two ranks each has both heads of keys, with four one or both."""
    assert_the_same(family_loads(family), size, make_ops, sp)


def test_tokens_of_a_model_with_latents_are_shared_out_by_nobody() -> None:
    with pytest.raises(ModelUnsupported, match="latent attention"):
        on_every_rank(2, lambda ranks: says(family_loads("deepseek-v3"), ranks, ReferenceOps()), 2)


@pytest.mark.parametrize("make_ops", [ReferenceOps, lambda: native_ops()], ids=["reference", "native"])
@pytest.mark.parametrize(
    ("family", "size"), [("mixtral", 2), ("qwen2-moe", 2), ("qwen3-moe", 3), ("mixtral", 4), ("llama4", 2)]
)
def test_experts_may_be_shared_out_whole(family: str, size: int, make_ops: Callable[[], Ops]) -> None:
    """Also where ranks have unequal numbers of them; the expert that all tokens pass is split as ever."""
    checkpoint = RandomCheckpoint(replace(FAMILIES[family], num_heads=12 // size * size, num_kv_heads=size))
    assert_the_same(shares_out(checkpoint, ExpertSharing()), size, make_ops)


def shares_out(checkpoint: Checkpoint, sharing: ExpertSharing, made: list[ExpertLayers] | None = None) -> Load:
    """A model whose ranks have whole experts. `made`: gets what each rank has."""
    config = checkpoint.config
    assert config.experts is not None
    count = config.experts.count

    def load(ops: Ops, ranks: Ranks | None) -> CausalLM:
        shard = Shard() if ranks is None else ranks.shard
        layers = ExpertLayers.of(ops, shard, config.num_layers, count, sharing)
        if made is not None:
            made.append(layers)
        return load_model(checkpoint, ops, ranks=ranks, experts=layers)

    return load


def native_ops() -> Ops:
    try:
        return NativeOps("float32", threads=1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", ["llama", "qwen2-moe", "qwen3-next"])
def test_kernels_of_the_cpu_run_parts_too(family: str) -> None:
    assert_the_same(loads(RandomCheckpoint(FAMILIES[family])), 2, native_ops)


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_is_summed_twice_whatever_is_in_it(size: int) -> None:
    """Attention and MLP; experts and the one that all tokens pass go together."""
    for family in ("llama", "mixtral", "qwen2-moe", "gemma2"):

        def sums(ranks: ThreadRanks, config: ModelConfig = FAMILIES[family]) -> int:
            says(loads(RandomCheckpoint(config)), ranks)
            return ranks.num_sums

        num_chunks, embedding, num_layers = 2, 1, 2
        assert on_every_rank(size, sums) == [num_chunks * (embedding + 2 * num_layers)] * size


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_heads_that_no_number_of_ranks_divides_are_shared_out_unevenly(family: str) -> None:
    """Three heads of keys on two ranks, as SmolLM2 has them."""
    shape = replace(FAMILIES[family], num_heads=6, num_kv_heads=3)
    assert_the_same(loads(RandomCheckpoint(shape)), 2)

    def heads(ranks: Ranks) -> tuple[int, int]:
        spec = load_model(RandomCheckpoint(shape), ReferenceOps(), ranks=ranks).spec
        return spec.num_heads, spec.num_kv_heads

    assert on_every_rank(2, heads) == [(2, 1), (4, 2)]


def test_heads_are_those_of_the_rank() -> None:
    """Four of queries and two of keys: with four ranks, two have the same keys."""

    def heads(ranks: Ranks) -> tuple[int, int]:
        spec = load_model(RandomCheckpoint(SHAPE), ReferenceOps(), ranks=ranks).spec
        return spec.num_heads, spec.num_kv_heads

    assert on_every_rank(1, heads) == [(4, 2)]
    assert on_every_rank(2, heads) == [(2, 1)] * 2
    assert on_every_rank(4, heads) == [(1, 1)] * 4


def gguf_of(path: Path, quantization: str) -> GGUFCheckpoint:
    return GGUFCheckpoint(
        write_gguf(path / "model.gguf", FOUR_RANKS, tensors_of(random_model(FOUR_RANKS)), quantization)
    )


@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gguf_in_parts(quantization: str, size: int, tmp_path: Path) -> None:
    assert_the_same(loads(gguf_of(tmp_path, quantization)), size)


@pytest.mark.parametrize(
    "layout", ["GPTQ", "GPTQ, one group", "AWQ", "packed, asymmetric", "packed, 8 bits", "W8A8", "W8A16"]
)
def test_a_directory_of_integers_in_parts(layout: str, tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS[layout], TWO_RANKS)
    assert_the_same(loads(HFCheckpoint(tmp_path)), 2)


@pytest.mark.parametrize("layout", ["fp8, static", "compressed-tensors, a scale per row"])
def test_a_directory_of_fp8_in_parts(layout: str, tmp_path: Path) -> None:
    fp8_checkpoints.write_fp8(tmp_path, fp8_checkpoints.LAYOUTS[layout], FOUR_RANKS)
    assert_the_same(loads(HFCheckpoint(tmp_path)), 4)


def test_weights_that_are_rounded_while_they_are_loaded_are_cut_first() -> None:
    """Groups of 128 inputs, of which each rank has whole ones: the same integers as of the whole weight."""
    config = replace(SHAPE, hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2)

    def load(ops: Ops, ranks: Ranks | None) -> CausalLM:
        return load_model(RandomCheckpoint(config), ops, quantize=lambda weight: to_quant("int8", weight), ranks=ranks)

    assert_the_same(load, 2)


def test_a_group_that_would_be_cut_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS["GPTQ"])  # 64 inputs of o_proj in groups of 32
    with pytest.raises(ModelUnsupported, match=r"layers\.0\.self_attn\.o_proj\.weight' .*groups of 32 inputs"):
        on_every_rank(4, lambda ranks: load_model(HFCheckpoint(tmp_path), ReferenceOps(), ranks=ranks))


def test_inputs_in_an_order_of_their_own_are_not_split(tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS["GPTQ, act-order"])
    with pytest.raises(ModelUnsupported, match=r"o_proj\.weight' .*act-order"):
        on_every_rank(2, lambda ranks: load_model(HFCheckpoint(tmp_path), ReferenceOps(), ranks=ranks))


@pytest.mark.parametrize("family", ["llama, tied and biased", "phi4", "qwen3-next", "qwen3.5"])
def test_an_adapter_in_parts(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    fused = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
    linear = ("q_proj", "v_proj", "o_proj", "out_proj", "in_proj_qkvz")
    split = ("k_proj", "out_proj", "in_proj_qkv", "in_proj_z", "gate_proj", "down_proj")
    kinds = {"phi4": fused, "qwen3-next": linear, "qwen3.5": split}
    targets = {"targets": kinds[family]} if family in kinds else {}
    adapter = read_peft(write_adapter(tmp_path, config, **targets))  # type: ignore[arg-type]

    def adapted(ranks: Ranks | None) -> Tensor:
        ops, sites = ReferenceOps(), list[Site]()
        model = load_model(RandomCheckpoint(config), ops, sites=sites, ranks=ranks)
        whole = with_adapters(model, sites, ops, 1)
        whole.bank.place(0, whole.bank.fit(adapter))
        driver = PagedDriver(whole, ops, block_size=64, shard=ranks.shard if ranks is not None else Shard())
        sequence = driver.sequence(PROMPT)
        sequence.blocks.append(1)
        work = [(sequence, len(PROMPT))]
        batch = with_states(make_batch(work, every_row=True), work, driver.states)
        with torch.inference_mode():
            return whole(replace(batch, adapters=(SlotRows(0, torch.arange(len(PROMPT))),)), driver.kv)

    expected = adapted(None)
    for logits in on_every_rank(2, adapted):
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(expected, says(loads(RandomCheckpoint(config))), atol=1e-2)


def test_one_rank_has_the_weights_as_they_are_and_nothing_around_them() -> None:
    random = RandomCheckpoint(SHAPE)
    arrays = {name: random.tensor(name) for name in random.tensor_names()}
    model = load_model(ArrayCheckpoint(SHAPE, arrays), ReferenceOps())
    assert isinstance(model, Decoder)
    first = model.layers[0]
    assert isinstance(first, DecoderLayer)
    for linear, name in ((first.attention.output, "self_attn.o_proj"), (first.mlp.down, "mlp.down_proj")):
        weight: Tensor = linear.keywords["weight"]  # type: ignore[attr-defined]
        assert weight.data_ptr() == arrays[f"model.layers.0.{name}.weight"].ctypes.data
    head: Tensor = model.head.keywords["weight"]  # type: ignore[attr-defined]
    assert head.data_ptr() == arrays["lm_head.weight"].ctypes.data


def test_rows_of_a_mapped_file_are_a_view_of_it() -> None:
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    rows = StoredTensor(values, "F32").part(Part((8, 6), slice(2, 4)), "it").values
    assert np.shares_memory(rows, values)
    np.testing.assert_array_equal(rows, values[2:4])


@pytest.mark.parametrize("layout", ["GPTQ", "AWQ"])
def test_a_part_of_packed_words_is_that_part_of_the_weight(layout: str, tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS[layout], TWO_RANKS)
    checkpoint, name = HFCheckpoint(tmp_path), "model.layers.0.mlp.down_proj.weight"
    whole = checkpoint.stored(name).widened()  # [64, 128]
    for rows in (slice(16, 48), slice(3, 6)):  # whole words of outputs, and not
        found = stored_part(checkpoint, name, Part((64, 128), rows, slice(32, 96))).widened()
        np.testing.assert_array_equal(found, whole[rows, 32:96])


@pytest.mark.parametrize("layout", ["GPTQ, one group", "packed, 8 bits", "W8A16"])
def test_a_part_of_a_channelwise_weight_keeps_the_scales_of_its_outputs(layout: str, tmp_path: Path) -> None:
    """Split by its inputs, each part has all scales; by its outputs, those of its own."""
    write_integers(tmp_path, LAYOUTS[layout], TWO_RANKS)
    checkpoint, name = HFCheckpoint(tmp_path), "model.layers.0.mlp.down_proj.weight"
    whole = checkpoint.stored(name).widened()  # [64, 128]
    for rows, columns in ((slice(0, 64), slice(8, 40)), (slice(16, 48), slice(0, 128)), (slice(3, 6), slice(4, 12))):
        found = stored_part(checkpoint, name, Part((64, 128), rows, columns)).widened()
        np.testing.assert_array_equal(found, whole[rows, columns])


def test_a_byte_of_two_inputs_is_not_split(tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS["GPTQ, one group"], TWO_RANKS)
    part = Part((64, 128), slice(0, 64), slice(3, 9))
    with pytest.raises(
        ModelUnsupported, match=r"down_proj\.weight' cannot be split at input 3: two inputs share a byte"
    ):
        stored_part(HFCheckpoint(tmp_path), "model.layers.0.mlp.down_proj.weight", part)


def test_a_part_of_a_gguf_unpacks_no_other_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = gguf_of(tmp_path, "Q4_0")
    whole = checkpoint.stored("model.layers.0.mlp.down_proj.weight").widened()  # [128, 512], in blocks of 32
    unpacked: list[int] = []
    plainly = gguf_file.grouped

    def counted(blocks: np.ndarray, type: GGMLQuantizationType, rows: int) -> object:
        unpacked.append(len(blocks))
        return plainly(blocks, type, rows)

    monkeypatch.setattr(gguf_file, "grouped", counted)
    part = Part((128, 512), slice(0, 64), slice(128, 192))
    found = stored_part(checkpoint, "model.layers.0.mlp.down_proj.weight", part).widened()
    np.testing.assert_array_equal(found, whole[:64, 128:192])
    assert unpacked == [64 * 2]
