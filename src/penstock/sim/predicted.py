"""A profile of a replica that nobody has measured: a model's shape on one GPU or on several, by the arithmetic of
`penstock plan`. A step of the simulator then takes as long as one of the plan.
"""

from __future__ import annotations

from penstock.capacity.plan import Case, Setup, replica_memory
from penstock.capacity.prediction import way
from penstock.capacity.step_cost import ENGINES, StepCost
from penstock.core.errors import ConfigError
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.parallelism import Parallelism
from penstock.core.slo import Slo
from penstock.sim.cost import StepCost as ProfileCost
from penstock.sim.profile import Profile


def predicted_profile(name: str, case: Case, setup: Setup, parallelism: Parallelism) -> Profile:
    """Raises ConfigError where the weights leave no room for keys and values."""
    gpu, config = case.hardware[setup.gpu], case.config
    memory = replica_memory(case, setup, parallelism)
    if memory.kv_tokens < ROUTING_TOKENS:
        raise ConfigError(
            f"{name} in {setup.formats} does not fit on {parallelism.num_ranks} x {setup.gpu}: use more of them, or "
            "smaller weights",
            param="tp",
        )
    cost = StepCost(config, gpu, ENGINES[case.engine], formats=setup.formats, parallelism=parallelism)
    over, num_ranks, target = way(gpu, parallelism), parallelism.num_ranks, case.demand.target
    return Profile(
        name=f"{setup.gpu}-{name}-{parallelism.short.lower().replace(' ', '-')}",
        cost=ProfileCost.of_times(cost),
        kv_tokens=memory.kv_tokens,
        max_sequences=case.max_num_seqs,
        chunk_tokens=case.chunk_tokens,
        max_context_tokens=min(config.context_length, memory.kv_tokens),
        devices=num_ranks,
        stages=parallelism.pp,
        slo=Slo(ttft_s=target.ttft_s or Slo().ttft_s, tpot_s=target.tpot_s or Slo().tpot_s),
        source=f"predicted by penstock plan, not measured: {name}, {setup.formats}, on {num_ranks} x {gpu.name}"
        + (f" ({over})" if over else "")
        + f", {case.engine}'s engine",
    )
