"""What `auto` comes to, on machines that are figures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capacity.formats import Formats
from penstock.capacity.memory import Memory, memory_in
from penstock.capacity.shapes import SHAPES
from penstock.capacity.smallest import Choice, Needs, choose_parallelism, needs_of
from penstock.capacity.splitting import split_obstacle, splits_over
from penstock.core.devices import VisibleGpu, VisibleGpus
from penstock.core.errors import ConfigError
from penstock.core.model_config import ModelConfig, StoredGroups
from penstock.core.parallelism import Parallelism
from penstock.core.settings import EngineSettings
from tests.examples import examples

GIB = 1 << 30
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
THREE_KEYS = replace(SHAPES["llama8b"], num_heads=24, num_kv_heads=3, intermediate_size=12_288)


def machine(count: int, gib: float = 79.6, name: str = H100, *, nvlinked: int | None = 8) -> VisibleGpus:
    return VisibleGpus((VisibleGpu(name, int(gib * GIB), int(gib * GIB) - GIB // 2),) * count, nvlinked)


def chosen(config: ModelConfig, visible: VisibleGpus, **wanted: int | None) -> Choice:
    return choose_parallelism(Needs(config), visible, **wanted)  # type: ignore[arg-type]


def test_seventy_billion_in_16_bits_on_eight_gpus_of_80_gb_takes_four_and_says_why() -> None:
    choice = chosen(SHAPES["llama70b"], machine(8))
    assert choice.parallelism == Parallelism(tp=4)
    assert choice.memory is not None
    assert choice.memory.weight_bytes / GIB == pytest.approx(131.4 / 4, abs=0.1)
    first, why = choice.lines
    assert re.fullmatch(
        "tensor parallel 4: 32.9 GiB of weights and 36 GiB of KV cache a rank; communication over NVLink, predicted: "
        r"\d+ % of a step of 32 sequences",
        first,
    )
    assert why.startswith("not fewer: TP1: 131 GiB of weights and 3.62 GiB for a step, and 71.6 GiB may be used; ")
    assert "TP2: room for 18,800 tokens, and a context is 131,072; " in why
    assert why.endswith("TP3: the MLP's intermediate size of 28,672 cannot be split so")


def test_shorter_contexts_and_smaller_numbers_need_fewer() -> None:
    needs = Needs(SHAPES["llama70b"])
    assert choose_parallelism(replace(needs, max_model_len=8192), machine(8)).parallelism.tp == 2
    assert choose_parallelism(replace(needs, formats=Formats("fp8", "fp8")), machine(8)).parallelism.tp == 2
    assert choose_parallelism(replace(needs, memory_fraction=0.4), machine(8)).parallelism.tp == 8
    assert choose_parallelism(replace(needs, beside_bytes=40 * GIB), machine(8)).parallelism.tp == 8


@pytest.mark.parametrize("visible", [machine(1), machine(8), VisibleGpus()])
def test_what_fits_on_one_device_stays_there_and_nothing_is_said(visible: VisibleGpus) -> None:
    choice = chosen(SHAPES["llama8b"], visible)
    assert choice.parallelism == Parallelism()
    assert choice.lines == ()


@pytest.mark.parametrize("visible", [machine(1), VisibleGpus()])
def test_one_gpu_or_none_is_one_rank_however_large_the_model(visible: VisibleGpus) -> None:
    assert chosen(SHAPES["llama405b"], visible).parallelism == Parallelism()


def test_heads_of_three_keys_go_to_two_ranks_unevenly() -> None:
    choice = chosen(THREE_KEYS, machine(4, 22.5, L4, nvlinked=1))
    assert choice.parallelism == Parallelism(tp=2)
    assert chosen(THREE_KEYS, machine(8, 7.0, L4)).parallelism == Parallelism(tp=6, sp=2), "not 4 or 5"


def test_ranks_beyond_the_heads_of_keys_share_out_tokens_and_no_others() -> None:
    few = replace(SHAPES["llama70b"], num_kv_heads=2)
    assert chosen(few, machine(8), tp=2).parallelism.sp == 1
    assert chosen(few, machine(8), tp=8).parallelism == Parallelism(tp=8, sp=4)
    shared, copied = (chosen(few, machine(8), tp=8, sp=sp).memory for sp in (None, 1))
    assert shared is not None
    assert copied is not None
    assert shared.kv_tokens > 3.9 * copied.kv_tokens


def test_with_sp_only_its_multiples_are_tried() -> None:
    assert chosen(SHAPES["llama70b"], machine(8), sp=2).parallelism == Parallelism(tp=4, sp=2)
    assert chosen(SHAPES["llama8b"], machine(8), sp=2).parallelism == Parallelism(tp=2, sp=2)
    assert chosen(SHAPES["llama8b"], VisibleGpus(), sp=2).parallelism == Parallelism(tp=2, sp=2)


def test_a_mixture_has_its_experts_cut_unless_that_would_cut_groups() -> None:
    assert chosen(SHAPES["mixtral-8x7b"], machine(8)).parallelism == Parallelism(tp=2)
    needs = Needs(SHAPES["qwen3-30b-a3b"], Formats("int4"), groups=StoredGroups(512))
    assert choose_parallelism(needs, machine(2, 17.0)).parallelism == Parallelism(tp=2, ep=2)
    assert chosen(SHAPES["mixtral-8x7b"], machine(8), ep=4).parallelism == Parallelism(tp=4, ep=4)


PRIME = replace(SHAPES["llama70b"], intermediate_size=28_657)


def test_a_shape_that_nothing_divides_becomes_a_pipeline_or_is_refused_by_its_dimension() -> None:
    choice = chosen(PRIME, machine(8))
    assert choice.parallelism == Parallelism(pp=3)
    assert choice.why.startswith("no number of ranks of tp alone has room for a whole context: TP1: 131 GiB of weights")
    assert "TP2, TP3, TP4, TP5, TP6, TP7, TP8: the MLP's intermediate size of 28,657 cannot be split so" in choice.why
    with pytest.raises(ConfigError, match=r"TP2, TP3, TP4.*: the MLP's intermediate size of 28,657.*or a pipeline"):
        chosen(PRIME, machine(8), pp=1)
    with pytest.raises(
        ConfigError, match=r"intermediate size of 28,657 cannot be split over 2 ranks.*one device, or a pipeline \(pp\)"
    ) as told:
        chosen(PRIME, machine(8), tp=2)
    assert told.value.param == "tp"


def test_a_pipeline_is_taken_where_layers_cannot_be_split_far_enough_and_nowhere_else() -> None:
    """Three GPUs: layers can be split over two, which have no room for a whole context."""
    assert chosen(SHAPES["llama70b"], machine(3)).parallelism == Parallelism(pp=3)
    assert chosen(SHAPES["llama70b"], machine(3), pp=1).parallelism == Parallelism(tp=2)
    assert chosen(SHAPES["llama70b"], machine(4)).parallelism == Parallelism(tp=4)
    large = replace(SHAPES["llama70b"], num_layers=180)
    assert chosen(large, machine(6)).parallelism == Parallelism(tp=2, pp=3), "and not six stages"
    shallow = replace(PRIME, num_layers=2)
    assert chosen(shallow, machine(8)).parallelism == Parallelism()
    with pytest.raises(ConfigError, match=r"nor does a pipeline \(pp\) of them"):
        chosen(replace(SHAPES["llama405b"], intermediate_size=53_233), machine(8))


def nodes(count: int, each: VisibleGpus) -> VisibleGpus:
    return VisibleGpus(each.gpus, each.num_nvlinked, count)


def test_several_nodes_have_a_stage_each_and_all_their_gpus_are_counted() -> None:
    choice = chosen(SHAPES["llama405b"], nodes(2, machine(8)))
    assert choice.parallelism == Parallelism(tp=8, pp=2)
    assert choice.link == "NVLink and the network"
    assert choice.communication is not None
    assert chosen(SHAPES["llama8b"], nodes(2, machine(8))).parallelism == Parallelism(pp=2), (
        "as many as there are nodes"
    )
    assert chosen(SHAPES["llama70b"], nodes(2, machine(8)), pp=2).parallelism == Parallelism(tp=2, pp=2)
    assert chosen(PRIME, nodes(2, machine(2))).parallelism == Parallelism(pp=3)
    assert chosen(SHAPES["llama8b"], nodes(2, machine(1))).parallelism == Parallelism(pp=2)
    assert chosen(SHAPES["llama8b"], nodes(3, VisibleGpus())).parallelism == Parallelism(pp=3)


def test_widths_that_were_asked_for_are_spread_over_nodes_as_they_are() -> None:
    two = nodes(2, machine(8))
    assert chosen(SHAPES["llama70b"], two, tp=8).parallelism == Parallelism(tp=8), "four on each"
    assert chosen(SHAPES["llama70b"], two, tp=1).parallelism == Parallelism(pp=2)
    assert chosen(SHAPES["llama70b"], two, pp=1).parallelism == Parallelism(tp=4)
    with pytest.raises(ConfigError, match="tp 1 and pp 1 cannot be spread over 2 nodes") as told:
        chosen(SHAPES["llama70b"], two, tp=1, pp=1)
    assert told.value.param == "nnodes"


def test_a_model_too_large_for_the_machine_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(ConfigError, match=r"756 GiB.*8 GPUs here: TP1.*TP8: 94.5 GiB.*work: 1, 2, 4, 8, 16.*set tp"):
        chosen(SHAPES["llama405b"], machine(8))
    assert chosen(SHAPES["llama405b"], machine(8), tp=8).parallelism == Parallelism(tp=8), "it was asked for"


def test_where_no_whole_context_fits_the_most_room_is_taken() -> None:
    choice = chosen(SHAPES["llama70b"], machine(2))
    assert choice.parallelism == Parallelism(tp=2)
    assert choice.why.startswith("no number of ranks has room for a whole context: TP1: ")


def test_links_that_are_slower_take_a_larger_share_and_unknown_gpus_none() -> None:
    config = SHAPES["llama70b"]
    joined, apart, unknown = (chosen(config, machine(4, nvlinked=count)) for count in (4, 2, None))
    assert (joined.link, apart.link, unknown.link) == ("NVLink", "PCIe", "")
    assert joined.communication is not None
    assert apart.communication is not None
    assert 0.05 < joined.communication == unknown.communication < apart.communication < 1
    strange = chosen(config, machine(4, name="NVIDIA Something"))
    assert strange.communication is None
    assert strange.lines[0].endswith("KV cache a rank")


def test_ranks_on_a_cpu_are_named_without_figures_of_a_gpu() -> None:
    assert chosen(SHAPES["llama8b"], VisibleGpus(), tp=2).lines == ("tensor parallel 2",)


def room(needs: Needs, visible: VisibleGpus, parallelism: Parallelism) -> Memory:
    used = [min(int(0.9 * gpu.total_bytes), gpu.free_bytes) for gpu in visible.gpus[: parallelism.num_ranks]]
    return memory_in(min(used), needs.config, formats=needs.formats, parallelism=parallelism)


gpus = st.builds(
    lambda total, free: VisibleGpu(H100, int(total * GIB), int(total * free * GIB)),
    st.floats(6, 200),
    st.floats(0.3, 1),
)
machines = st.lists(gpus, min_size=2, max_size=8).map(lambda each: VisibleGpus(tuple(each), 2))
odd = st.builds(
    lambda config, keys, each, ffn: replace(
        config, num_kv_heads=keys, num_heads=keys * each, intermediate_size=ffn * 128
    ),
    st.sampled_from([SHAPES["llama8b"], SHAPES["llama70b"], SHAPES["mixtral-8x7b"]]),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(60, 240),
)
needed = st.builds(
    Needs,
    st.sampled_from(list(SHAPES.values())) | odd,
    st.builds(Formats, st.sampled_from(["bfloat16", "fp8", "int4"])),
    groups=st.none() | st.just(StoredGroups(128)),
)


@settings(max_examples=examples(60))
@given(needs=needed, visible=machines)
def test_a_choice_fits_and_is_the_smallest_and_a_refusal_means_that_nothing_does(
    needs: Needs, visible: VisibleGpus
) -> None:
    most = len(visible.gpus)
    found = [splits_over(needs.config, tp, None, needs.groups) for tp in range(1, most + 1)]
    widths = [each for each in found if each is not None]
    staged = [
        replace(each, pp=pp) for each in widths for pp in range(2, min(most // each.tp, needs.config.num_layers) + 1)
    ]
    rooms = {each: room(needs, visible, each).kv_tokens for each in [*widths, *staged]}
    if not any(rooms.values()):
        with pytest.raises(ConfigError, match=r"(of weights|cannot be split so)"):
            choose_parallelism(needs, visible)
        return
    choice = choose_parallelism(needs, visible)
    assert split_obstacle(needs.config, choice.parallelism, needs.groups) is None
    assert choice.parallelism.num_ranks <= len(visible.gpus)
    assert choice.memory is not None
    assert choice.memory.kv_tokens == rooms[choice.parallelism] > 0
    whole = [each for each, kv_tokens in rooms.items() if kv_tokens >= needs.context]
    if not whole:
        assert choice.memory.kv_tokens == max(rooms.values())
        return
    assert choice.parallelism in whole
    preferred = [each for each in whole if each.pp == 1] or whole
    assert choice.parallelism in preferred, "layers are split where that is enough"
    assert choice.parallelism.num_ranks == min(each.num_ranks for each in preferred)


def test_copies_of_experts_take_room_beside_a_ranks_share() -> None:
    """Mixtral's experts are three matrices of 4,096 by 14,336, in 32 layers, in bfloat16."""
    config = SHAPES["mixtral-8x7b"]
    each = 32 * (3 * 4096 * 14_336 + 4096) * 2  # and its row of the router
    needs = [needs_of(EngineSettings(tp=4, ep=4, pp=pp, redundant_experts=2), config).beside_bytes for pp in (1, 2)]
    assert needs == [2 * each, each]
    assert needs_of(EngineSettings(tp=4, ep=4), config).beside_bytes == 0
