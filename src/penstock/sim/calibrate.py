"""A cost model from an engine's own steps: least squares of the relative error, all coefficients at least zero.

The roofline's corner, where products begin to take longer than reading the weights, is looked for on a grid; for each
corner the model is linear. Steps that took far longer than their like (a machine that was busy with something else) are
left out of a second fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.hashing import ROUTING_TOKENS
from penstock.engine.step_log import HEADER, StepLimits, StepShape
from penstock.sim.cost import StepCost
from penstock.sim.profile import Profile

_FEWEST = 50  # steps: below that a fit says nothing
_FAR_OFF = 3.0  # times the usual error: an outlier
_MAX_LEFT_OUT = 0.1  # of all steps
_CORNERS = np.geomspace(1.0, 4096.0, 25)  # tokens

Matrix = NDArray[np.float64]
_step_limits_decoder = msgspec.json.Decoder(StepLimits)


@dataclass(frozen=True)
class Fit:
    cost: StepCost
    num_steps: int
    num_left_out: int
    error: float  # of a step: the median of what it is off by, as a share
    bias: float  # of all steps together: what the model says over what was measured, less one

    def profile(self, name: str, limits: StepLimits, like: Profile | None = None) -> Profile:
        block_tokens = limits.block_tokens if ROUTING_TOKENS % limits.block_tokens == 0 else ROUTING_TOKENS
        own = Profile(
            name=name,
            cost=self.cost,
            kv_tokens=limits.kv_tokens,
            max_sequences=limits.max_sequences,
            chunk_tokens=limits.chunk_tokens,
            max_context_tokens=limits.max_context_tokens,
            block_tokens=block_tokens,
            overlaps=limits.overlaps,
            source=f"{self.num_steps} steps of an engine's log",
        )
        return own if like is None else replace(own, slo=like.slo, request_s=like.request_s)

    def summary(self) -> str:
        cost = self.cost
        decode, prompts = StepShape(0, 0, 1, 512), StepShape(512, 512 * 257)
        return (
            f"{self.num_steps} steps ({self.num_left_out} outliers left out): half of them within {self.error:.1%}, "
            f"all together {self.bias:+.1%}\n"
            f"one decode {cost.seconds(decode) * 1000:.2f} ms, a prompt of 512 tokens {cost.seconds(prompts):.3f} s"
        )


def read_steps(path: Path) -> tuple[list[tuple[StepShape, float]], StepLimits]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        limits = _step_limits_decoder.decode(lines[0].removeprefix("# "))
        if lines[1] != HEADER:
            raise ValueError(f"its columns are {lines[1]}")
        rows = [line.split(",") for line in lines[2:] if line.count(",") == HEADER.count(",")]
        steps = [(StepShape(*map(int, row[:-1])), float(row[-1])) for row in rows]
    except (IndexError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no step log: {error}") from None
    return [(shape, seconds) for shape, seconds in steps if seconds > 0], limits


def calibrate(steps: Sequence[tuple[StepShape, float]]) -> Fit:
    if len(steps) < _FEWEST:
        raise ConfigError(f"a step log of {len(steps)} steps is too short: {_FEWEST} at least are needed")
    shapes = np.array([shape for shape, _ in steps], dtype=np.float64)
    seconds = np.array([seconds for _, seconds in steps], dtype=np.float64)
    kept = np.ones(len(steps), dtype=bool)
    cost = _fit(shapes, seconds)
    for _ in range(2):
        errors = _errors(cost, steps, seconds)
        usual = max(float(np.median(np.abs(errors))), 0.01)
        far_off = -_FAR_OFF * usual / (1 + _FAR_OFF * usual)  # the model says far less than it took
        kept = errors > min(far_off, float(np.quantile(errors, _MAX_LEFT_OUT)))
        cost = _fit(shapes[kept], seconds[kept])
    chosen = [step for step, is_kept in zip(steps, kept, strict=True) if is_kept]
    errors = _errors(cost, chosen, seconds[kept])
    said = sum(cost.seconds(shape) for shape, _ in chosen)
    return Fit(
        cost=cost,
        num_steps=len(chosen),
        num_left_out=len(steps) - len(chosen),
        error=float(np.median(np.abs(errors))),
        bias=said / float(seconds[kept].sum()) - 1.0,
    )


def _errors(cost: StepCost, steps: Sequence[tuple[StepShape, float]], seconds: Matrix) -> Matrix:
    return np.array([cost.seconds(shape) for shape, _ in steps]) / seconds - 1.0


def _fit(shapes: Matrix, seconds: Matrix) -> StepCost:
    prefill, pairs, decodes, context, drafts = shapes.T
    tokens = prefill + decodes + drafts

    def at(corner: float) -> tuple[float, float, Matrix]:
        columns = [np.ones_like(tokens), np.maximum(tokens, corner), pairs, context, decodes]
        loss, factors = _least_squares(np.stack(columns, axis=1) / seconds[:, None], np.ones_like(seconds))
        return loss, corner, factors

    _, roughly, _ = min((at(corner) for corner in _CORNERS), key=lambda found: found[0])
    width = _CORNERS[1] / _CORNERS[0]
    finer = np.geomspace(roughly / width, roughly * width, 25)
    _, corner, (step_s, token_s, pair_s, context_s, sequence_s) = min(map(at, finer), key=lambda found: found[0])
    return StepCost(
        step_s=float(step_s),
        weights_s=float(corner * token_s),
        token_s=float(token_s),
        pair_s=float(pair_s),
        context_s=float(context_s),
        sequence_s=float(sequence_s),
    )


def _least_squares(columns: Matrix, wanted: Matrix) -> tuple[float, Matrix]:
    """None of the factors below zero: with five of them every set that may be nonzero is tried."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    columns = columns / scale
    products, target = columns.T @ columns, columns.T @ wanted
    num_columns, total = columns.shape[1], float(wanted @ wanted)
    best, factors = total, np.zeros(num_columns)
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            index = list(chosen)
            solved, *_ = np.linalg.lstsq(products[np.ix_(index, index)], target[index], rcond=None)
            if (solved < 0).any():
                continue
            loss = total - float(target[index] @ solved)
            if loss < best:
                best, factors = loss, np.zeros(num_columns)
                factors[index] = solved
    return best, factors / scale
