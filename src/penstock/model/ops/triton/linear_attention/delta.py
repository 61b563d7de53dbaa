"""The gated delta rule on a GPU (Gated DeltaNet), for decodes and prompts alike: sequences of any number of tokens,
heads of any size. A decode's limit is the memory's bandwidth: it reads and writes a state. A prompt is taken token by
token, which is latency: chunks that are solved for together would be faster there. Not measured.

Three launches: the convolution, the rule, the gated norm. The host asks for no lengths, so graphs hold them. A program
takes some columns of one head's state from the first token to the last: a sequence's results depend neither on the
batch nor on how its prompt was cut.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import DeltaSpec

_CHANNELS = 128  # of a program of the convolution
_TOKENS = 16  # that it takes together
_COLUMNS = 32  # of a state, of a program of the rule


def delta_rule(projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
    """See `Ops.delta_rule`."""
    states = batch.states
    assert states is not None, "a model with a recurrent state is run with its slots"
    state = states.layers[spec.place]
    tokens, width = projected.shape
    channels, heads, served = spec.num_channels, spec.num_value_heads, spec.num_value_heads // spec.num_key_heads
    convolved = torch.empty(tokens, channels, dtype=torch.float32, device=projected.device)
    _convolve_kernel[(batch.num_sequences, triton.cdiv(channels, _CHANNELS))](
        projected,
        spec.conv,
        state.conv,
        convolved,
        batch.query_starts,
        batch.positions,
        states.slots,
        CHANNELS=channels,
        WIDTH=width,
        KERNEL=len(spec.conv),
        BLOCK=_CHANNELS,
        TOKENS=_TOKENS,
        num_warps=4,
    )
    found = torch.empty(tokens, heads * spec.value_dim, dtype=torch.float32, device=projected.device)
    columns = min(_COLUMNS, triton.next_power_of_2(spec.value_dim))
    _delta_kernel[(batch.num_sequences, heads, triton.cdiv(spec.value_dim, columns))](
        convolved,
        ba,
        spec.decay,
        spec.dt_bias,
        state.recurrent,
        found,
        batch.query_starts,
        batch.positions,
        states.slots,
        CHANNELS=channels,
        HEADS=heads,
        KEY_HEADS=spec.num_key_heads,
        SERVED=served,
        KEY_DIM=spec.key_dim,
        VALUE_DIM=spec.value_dim,
        KEY_BLOCK=triton.next_power_of_2(spec.key_dim),
        COLUMNS=columns,
        num_warps=4,
    )
    out = torch.empty(tokens, heads * spec.value_dim, dtype=projected.dtype, device=projected.device)
    _norm_kernel[(tokens,)](
        found,
        projected,
        spec.norm.weight,
        out,
        spec.norm.eps,
        CHANNELS=channels,
        WIDTH=width,
        HEADS=heads,
        VALUE_DIM=spec.value_dim,
        HEAD_BLOCK=triton.next_power_of_2(heads),
        BLOCK=triton.next_power_of_2(spec.value_dim),
        num_warps=4,
    )
    return out


@triton.jit
def _convolve_kernel(
    projected_ptr,
    taps_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    positions_ptr,
    slots_ptr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """silu of the sum over the last KERNEL tokens, those before the step by its state; then the state after it."""
    sequence = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    count = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    is_known = tl.load(positions_ptr + start) > 0  # else nothing was before the step
    state_ptr += slot * (KERNEL - 1) * CHANNELS
    inside = c < CHANNELS
    for first in range(0, count, TOKENS):
        t = first + tl.arange(0, TOKENS)
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(KERNEL):
            at = t - (KERNEL - 1) + tap
            here = (at >= 0) & (at < count)
            x = tl.load(
                projected_ptr + (start + at)[:, None] * WIDTH + c[None, :],
                mask=here[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            x += tl.load(
                state_ptr + (KERNEL - 1 + at)[:, None] * CHANNELS + c[None, :],
                mask=(at < 0)[:, None] & inside[None, :] & is_known,
                other=0.0,
            )
            total += x * tl.load(taps_ptr + tap * CHANNELS + c, mask=inside, other=0.0)[None, :]
        total = total / (1.0 + tl.exp(-total))
        tl.store(
            out_ptr + (start + t)[:, None] * CHANNELS + c[None, :], total, mask=(t < count)[:, None] & inside[None, :]
        )
    tl.debug_barrier()  # what is kept is read by threads that do not write it
    for row in tl.static_range(KERNEL - 1):
        at = count - (KERNEL - 1) + row
        x = tl.load(projected_ptr + (start + at) * WIDTH + c, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        x += tl.load(state_ptr + (KERNEL - 1 + at) * CHANNELS + c, mask=inside & (at < 0) & is_known, other=0.0)
        tl.store(state_ptr + row * CHANNELS + c, x, mask=inside)


@triton.jit
def _delta_kernel(
    convolved_ptr,
    ba_ptr,
    decay_ptr,
    dt_bias_ptr,
    state_ptr,
    out_ptr,
    starts_ptr,
    positions_ptr,
    slots_ptr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state, through a sequence's tokens."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    v = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, KEY_BLOCK)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    end = tl.load(starts_ptr + sequence + 1).to(tl.int64)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    is_known = tl.load(positions_ptr + start) > 0
    inside_k, inside_v = k < KEY_DIM, v < VALUE_DIM
    state_ptr += (slot * HEADS + head) * KEY_DIM * VALUE_DIM
    places = k[:, None] * VALUE_DIM + v[None, :]
    inside = inside_k[:, None] & inside_v[None, :]
    memory = tl.load(state_ptr + places, mask=inside & is_known, other=0.0)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    for token in range(start, end):
        row = convolved_ptr + token * CHANNELS
        queries = tl.load(row + (head // SERVED) * KEY_DIM + k, mask=inside_k, other=0.0)
        keys = tl.load(row + (KEY_HEADS + head // SERVED) * KEY_DIM + k, mask=inside_k, other=0.0)
        values = tl.load(row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v, mask=inside_v, other=0.0)
        queries = queries / tl.sqrt(tl.sum(queries * queries, 0) + 1e-6) / tl.sqrt(KEY_DIM * 1.0)
        keys = keys / tl.sqrt(tl.sum(keys * keys, 0) + 1e-6)
        b = tl.load(ba_ptr + token * 2 * HEADS + head).to(tl.float32)
        a = tl.load(ba_ptr + token * 2 * HEADS + HEADS + head).to(tl.float32) + dt_bias
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        memory = memory * tl.exp(-decay * softplus)
        known = tl.sum(memory * keys[:, None], 0)
        added = (values - known) / (1.0 + tl.exp(-b))
        memory += keys[:, None] * added[None, :]
        found = tl.sum(memory * queries[:, None], 0)
        tl.store(out_ptr + (token * HEADS + head) * VALUE_DIM + v, found, mask=inside_v)
    tl.store(state_ptr + places, memory, mask=inside)


@triton.jit
def _norm_kernel(
    found_ptr,
    projected_ptr,
    weight_ptr,
    out_ptr,
    eps,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gated norm of all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    v = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (v < VALUE_DIM)
    place = head * VALUE_DIM + v
    x = tl.load(found_ptr + token * HEADS * VALUE_DIM + place, mask=inside, other=0.0)
    gates = tl.load(projected_ptr + token * WIDTH + CHANNELS + place, mask=inside, other=0.0).to(tl.float32)
    x = x / tl.sqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)[:, None]
    x *= tl.load(weight_ptr + v, mask=v < VALUE_DIM, other=0.0)
    tl.store(out_ptr + token * HEADS * VALUE_DIM + place, x * gates / (1.0 + tl.exp(-gates)), mask=inside)
