"""Adapters in a GPU's slots add what those of the reference do, whatever the ranks, whoever is beside whom; or on no
GPU, interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.peft import read_peft
from penstock.model.batch import Batch, SlotRows
from penstock.model.loading import load_model
from penstock.model.lora import AdaptedModel, with_adapters
from penstock.model.lora_slots import AdaptedLinear, HostPair, HostPairs, PlainSlots
from penstock.model.ops import AttentionSpec, LayerKV
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.lora.slots import TritonSlots
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.weights import Site
from tests.devices import DEVICE, IS_INTERPRETED, NEEDS_GPU, NEEDS_SPEED, SLOW_INTERPRETED, matrix, slow
from tests.model.lora import merged, write_adapter
from tests.model.paged import PagedDriver
from tests.model.tiny import ArrayCheckpoint

# The reference rounds twice more than we do.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

NUM_SITES = 1 if IS_INTERPRETED else 2
Ranks = Sequence[int]  # of an adapter at each part of a site; 0: it leaves it alone
QKV, OUTPUT = (96, 32, 32), (64,)
MIXED: list[Ranks] = [(16, 16, 16), (1, 0, 7), (40, 3, 17), (0, 0, 0)]


@dataclass
class Both:
    """The same adapters in our slots and in the reference's."""

    dtype: torch.dtype
    inputs: int
    outputs: tuple[int, ...]
    adapters: list[Ranks]  # one per slot
    num_sites: int = 2

    def __post_init__(self) -> None:
        names = [{f"{site}.{part}": size for part, size in enumerate(self.outputs)} for site in range(self.num_sites)]
        sites = [Site(lambda x: x, each, self.inputs) for each in names]
        ours, theirs = TritonOps(DEVICE, self.dtype), ReferenceOps(DEVICE, self.dtype)
        self.ours = TritonSlots(ours, sites, len(self.adapters), max_rank=256)
        self.theirs = PlainSlots(theirs, len(self.adapters))
        for slot, ranks in enumerate(self.adapters):
            self.place(slot, ranks)

    def place(self, slot: int, ranks: Ranks) -> None:
        pairs = {site: pair for site in range(self.num_sites) if (pair := self.pair(ranks))}
        for slots in (self.ours, self.theirs):
            slots.place(slot, slots.prepared(pairs))

    def pair(self, ranks: Ranks) -> HostPair | None:
        rows, parts, column = [], [], 0
        for rank, size in zip(ranks, self.outputs, strict=True):
            if rank:
                first = sum(len(each) for each in rows)
                parts.append((torch.randn(size, rank) * rank**-0.5, 0.7, first, column))
                rows.append(torch.randn(rank, self.inputs) * self.inputs**-0.5)
            column += size
        return HostPair(torch.cat(rows), parts) if rows else None

    def check(self, slots: list[int], num_decodes: int) -> None:
        """`slots`: of each token."""
        x = torch.randn(len(slots), self.inputs, device=DEVICE).to(self.dtype)
        base = torch.randn(len(slots), sum(self.outputs), device=DEVICE).to(self.dtype)
        batch = batch_of(slots, num_decodes)
        for site in range(self.num_sites):
            results = []
            for found in (self.ours, self.theirs):
                found.begin(batch)
                y = base.clone()
                found.add(site, x, y)
                results.append(y)
            ours, theirs = results
            tolerance = TOLERANCES[self.dtype]
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
            alone = torch.tensor([slot < 0 or not any(self.adapters[slot]) for slot in slots])
            assert torch.equal(ours[alone], base[alone]), "a row without an adapter was changed"


def batch_of(slots: list[int], num_decodes: int) -> Batch:
    numbers = torch.zeros(len(slots), dtype=torch.int32, device=DEVICE)
    on_device = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    groups = tuple(SlotRows(slot, (on_device == slot).nonzero().flatten()) for slot in sorted(set(slots)) if slot >= 0)
    return Batch(numbers, numbers, numbers, numbers, numbers[None], numbers, num_decodes, None, groups, slots=on_device)


STEPS = {
    "one": ([2], 1),
    "decodes": ([0, -1, 2, 1, 0, 3], 6),
    "chunk": ([2] * 21, 0),
    "chunks": ([-1] * 3 + [0] * 30 + [-1] * 2 + [2] * 40 + [1] * 5, 0),
    "mixed": ([1, 0, -1] + [0] * 9 + [-1] * 4 + [2] * 3, 3),
    "none": ([-1] * 5, 2),
}
SITES = [(64, QKV), (72, OUTPUT), (1040, (48, 24))]
CASES = matrix(
    list(product(TOLERANCES, SITES, STEPS)),
    [
        (torch.float16, SITES[1], "mixed"),
        (torch.float32, SITES[0], "none"),
        slow(torch.float32, SITES[0], "mixed"),
        slow(torch.float32, SITES[2], "chunks"),
        slow(torch.float16, SITES[2], "decodes"),
    ],
)


@pytest.mark.parametrize(("dtype", "site", "step"), CASES, ids=str)
def test_rows_get_what_their_adapter_adds(dtype: torch.dtype, site: tuple[int, tuple[int, ...]], step: str) -> None:
    torch.manual_seed(0)
    inputs, outputs = site
    Both(dtype, inputs, outputs, [ranks[: len(outputs)] for ranks in MIXED], NUM_SITES).check(*STEPS[step])


@pytest.mark.parametrize(
    ("dtype", "rank"),
    matrix(
        list(product(TOLERANCES, [1, 15, 33, 256])),
        [(torch.float32, 33), (torch.float16, 1), slow(torch.float32, 256)],
    ),
    ids=str,
)
def test_any_rank(dtype: torch.dtype, rank: int) -> None:
    torch.manual_seed(rank)
    both = Both(dtype, 80, (48,), [(rank,), (3,)], num_sites=1)
    both.check([0, 1, -1, 0], 4)
    both.check([1] + [0] * 18 + [1] * 3, 1)


@NEEDS_SPEED
@pytest.mark.parametrize("rows", [1, 3, 50, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (4096, 1024, 1024)), (14336, (4096,)), (4096, (14336, 14336))])
def test_the_sizes_of_a_real_model(rows: int, inputs: int, outputs: tuple[int, ...]) -> None:
    torch.manual_seed(rows)
    ranks = [tuple((16, 8, 64, 0, 200)[(slot + part) % 5] for part in range(len(outputs))) for slot in range(7)]
    both = Both(torch.bfloat16, inputs, outputs, ranks, num_sites=1)
    both.check([(row * 5) % 8 - 1 for row in range(rows)], rows)
    both.check(sorted((row * 5) % 8 - 1 for row in range(rows)), 0)


@NEEDS_GPU
@pytest.mark.parametrize("rows", [4, 40])
def test_a_captured_step_reads_slots_and_adapters_as_they_are_when_it_runs(rows: int) -> None:
    """Layer after layer, each on what the one before made."""
    torch.manual_seed(0)
    both = Both(torch.float32, 160, QKV, MIXED, num_sites=12)
    linears = [TritonOps(DEVICE, torch.float32).linear(torch.randn(160, 160) * 0.05) for _ in range(12)]
    slots, x = torch.zeros(rows, dtype=torch.int32, device=DEVICE), torch.randn(rows, 160, device=DEVICE)

    def run(found: TritonSlots | PlainSlots, batch: Batch) -> Tensor:
        found.begin(batch)
        y = x
        for site, linear in enumerate(linears):
            y = AdaptedLinear(linear, site, found)(y)
        return y

    batch = replace(batch_of([0] * rows, rows), slots=slots)
    run(both.ours, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = run(both.ours, batch)
    for turn in range(6):
        now = [(row * (turn + 3)) % 5 - 1 for row in range(rows)] if turn < 5 else [-1] * rows
        both.place(turn % 3, (5 + turn, 9, 2))
        slots.copy_(torch.tensor(now))
        graph.replay()
        torch.testing.assert_close(ours, run(both.theirs, batch_of(now, rows)), atol=1e-4, rtol=1e-4)


@SLOW_INTERPRETED
def test_slot_holds_what_was_put_there_last() -> None:
    torch.manual_seed(0)
    both = Both(torch.float32, 64, QKV, [(200, 200, 200), (4, 4, 4)])
    both.adapters[0] = (2, 0, 3)
    both.place(0, both.adapters[0])
    both.check([0, 1, -1, 0], 4)
    both.ours.clear(0)
    both.theirs.clear(0)
    both.adapters[0] = (0, 0, 0)
    both.check([0, 1, -1, 0], 4)


def test_adapter_that_finds_no_room_is_refused_and_one_of_few_layers_may_have_a_larger_rank() -> None:
    sites = [Site(lambda x: x, {f"{site}.a": 48, f"{site}.b": 48}, 32) for site in range(2)]
    slots = TritonSlots(TritonOps(DEVICE, torch.float32), sites, 1, max_rank=8)

    def pairs(rank: int, num_sites: int) -> HostPairs:
        b = torch.randn(48, rank)
        pair = HostPair(torch.randn(2 * rank, 32), [(b, 1.0, 0, 0), (b, 1.0, rank, 48)])
        return dict.fromkeys(range(num_sites), pair)

    slots.prepared(pairs(8, 2))
    slots.prepared(pairs(16, 1))
    with pytest.raises(ModelUnsupported, match="rank 8 on every linear layer takes; raise max_lora_rank"):
        slots.prepared(pairs(9, 2))


@NEEDS_GPU  # whose programs run in any order
def test_what_an_adapter_adds_does_not_vary() -> None:
    torch.manual_seed(0)
    both = Both(torch.float32, 1040, (48, 24), [(16, 16), (33, 2)], num_sites=1)
    x, slots = torch.randn(40, 1040, device=DEVICE), [0, 1] + [1] * 38

    def added() -> Tensor:
        y = torch.zeros(40, 72, device=DEVICE)
        both.ours.begin(batch_of(slots, 2))
        both.ours.add(0, x, y)
        return y

    assert torch.equal(added(), added())


CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=64,
    attention_bias=True,
)
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73]


@dataclass(frozen=True)
class InSlot:
    """A model whose every token has the same adapter."""

    model: AdaptedModel
    slot: int

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def spec(self) -> AttentionSpec:
        return self.model.spec

    def __call__(self, batch: Batch, kv: Sequence[LayerKV]) -> Tensor:
        return self.model(replace(batch, slots=torch.full_like(batch.token_ids, self.slot)), kv)


@pytest.mark.parametrize("chunk", matrix([19, 1, 6], [slow(13)]))  # interpreted: many rows and few
def test_a_models_output_is_that_of_merged_weights(tmp_path: Path, chunk: int) -> None:
    ops, sites = TritonOps(DEVICE, torch.float32), list[Site]()
    checkpoint = RandomCheckpoint(CONFIG)
    model = with_adapters(load_model(checkpoint, ops, sites=sites), sites, ops, num_slots=2, max_rank=16)
    adapter = read_peft(write_adapter(tmp_path / "a", CONFIG, rank=5, ranks={"v_proj": 3, "down_proj": 17}))
    model.bank.place(1, model.bank.fit(adapter))
    weights = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    plainest = ReferenceOps()
    expected = load_model(ArrayCheckpoint(CONFIG, merged(weights, adapter)), plainest)
    theirs = PagedDriver(expected, plainest, block_size=16).prefill(PROMPT)
    ours = PagedDriver(InSlot(model, 1), ops, block_size=16).prefill(PROMPT, chunk).cpu()
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    base = PagedDriver(InSlot(model, -1), ops, block_size=16).prefill(PROMPT, chunk).cpu()
    assert (base - theirs).abs().max() > 0.1, "the adapter makes no difference"
    plain = PagedDriver(model, ops, block_size=16).prefill(PROMPT, chunk).cpu()
    torch.testing.assert_close(base, plain, atol=2e-5, rtol=2e-5)
