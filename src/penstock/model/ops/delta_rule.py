"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) in plain torch, over recurrent states of many sequences.

A head's state S [key_dim, value_dim] is a memory of values by keys. It forgets a share of all it holds at each token,
and its answer to the token's key moves a share of the way to the token's value:

    S = exp(g) S;   S = S + beta k (v - S^T k)^T;   o = S^T q

One token of each sequence is a step of that. Many are taken in chunks, whose tokens are solved for together: inside a
chunk what each token adds depends on those before it by a triangular system, and only chunks follow one another.
All of it is computed in float32, whatever activations are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.batch import Batch, LayerState
from penstock.model.ops import DeltaSpec

CHUNK = 64  # tokens that are solved for together
_EPS = 1e-6  # of the lengths of queries and keys


def delta_rule(projected: Tensor, ba: Tensor, spec: DeltaSpec, batch: Batch) -> Tensor:
    """See `Ops.delta_rule`."""
    states = batch.states
    assert states is not None, "a model with a recurrent state is run with its slots"
    state = states.layers[spec.place]
    out = projected.new_empty(len(projected), spec.num_value_heads * spec.value_dim)
    for rows, members in _groups(batch):  # [sequences, tokens], [sequences]
        slots = states.slots[members].long()
        is_first = batch.positions[rows[:, 0]] == 0
        found = _advanced(projected[rows].float(), ba[rows].float(), spec, state, slots, is_first)
        out[rows] = found.flatten(2).to(out.dtype)
    return out


def _groups(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that bring equally many tokens, and the rows of these."""
    device = batch.token_ids.device
    if batch.num_decodes == batch.num_sequences == batch.num_tokens:  # known without asking the device
        members = torch.arange(batch.num_sequences, device=device)
        yield members[:, None], members
        return
    lengths: dict[int, list[int]] = {}
    for sequence, length in enumerate(batch.query_starts.diff().tolist()):
        lengths.setdefault(length, []).append(sequence)
    for length, sequences in lengths.items():
        members = torch.tensor(sequences, device=device)
        yield batch.query_starts[members].long()[:, None] + torch.arange(length, device=device), members


def _advanced(
    projected: Tensor, ba: Tensor, spec: DeltaSpec, state: LayerState, slots: Tensor, is_first: Tensor
) -> Tensor:
    """Outputs of some sequences' heads, [sequences, tokens, value heads, value_dim]. Their states are advanced."""
    channels, heads = spec.num_channels, spec.num_value_heads
    mixed, gates = projected.split_with_sizes([channels, projected.shape[-1] - channels], dim=-1)
    before = state.conv[slots].masked_fill(is_first[:, None, None], 0.0)
    seen = torch.cat((before, mixed), dim=1)  # [sequences, kernel - 1 + tokens, channels]
    state.conv[slots] = seen[:, -before.shape[1] :]
    convolved = F.silu(F.conv1d(seen.transpose(1, 2), spec.conv.T[:, None], groups=channels)).transpose(1, 2)

    keys_size = spec.num_key_heads * spec.key_dim
    q, k, v = convolved.split_with_sizes([keys_size, keys_size, channels - 2 * keys_size], dim=-1)
    q, k = (_unit(_by_head(each, spec.key_dim)) for each in (q, k))
    served = heads // spec.num_key_heads
    q, k = (each.repeat_interleave(served, dim=2).transpose(1, 2) for each in (q * spec.key_dim**-0.5, k))
    v = _by_head(v, spec.value_dim).transpose(1, 2)  # [sequences, heads, tokens, dim]
    b, a = ba.transpose(1, 2).chunk(2, dim=1)  # [sequences, heads, tokens]
    beta, log_decay = b.sigmoid(), -spec.decay[:, None] * F.softplus(a + spec.dt_bias[:, None])

    memory = state.recurrent[slots].masked_fill(is_first[:, None, None, None], 0.0)
    advance = step if q.shape[2] == 1 else chunks
    out, state.recurrent[slots] = advance(q, k, v, beta, log_decay, memory)
    return _normed(out.transpose(1, 2), _by_head(gates, spec.value_dim), spec)


def step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence: its results [sequences, heads, 1, value_dim], and the states after it."""
    memory = memory * log_decay.exp()[..., None]
    delta = beta[..., None] * (v - k @ memory)
    memory = memory + k.transpose(2, 3) @ delta
    return q @ memory, memory


def chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Many tokens of each sequence, as `step` would take them one after the other."""
    found = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        of_tokens = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part], log_decay[:, :, part]
        out, memory = _chunk(*of_tokens, memory)
        found.append(out)
    return torch.cat(found, dim=2), memory


def _chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Solves for several tokens together. Token i adds u_i under its key; with G the sum of log decays:

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_j . k_i) u_j)
    """
    total = log_decay.cumsum(dim=2)  # [sequences, heads, tokens]
    between = total[..., :, None] - total[..., None, :]  # log decay between each pair of tokens
    tokens = q.shape[2]
    is_after = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    decays = between.masked_fill(is_after, -torch.inf).exp()
    system = (k @ k.transpose(2, 3)) * decays * beta[..., None]  # its diagonal is taken for ones
    known = beta[..., None] * (v - total.exp()[..., None] * (k @ memory))
    added = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    out = total.exp()[..., None] * (q @ memory) + ((q @ k.transpose(2, 3)) * decays) @ added
    left = (total[..., -1:] - total).exp()[..., None]
    return out, memory * total[..., -1:, None].exp() + (k * left).transpose(2, 3) @ added


def _by_head(x: Tensor, dim: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, dim)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _EPS)


def _normed(x: Tensor, gates: Tensor, spec: DeltaSpec) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + spec.norm.eps)
    return x * spec.norm.weight.float() * F.silu(gates)
