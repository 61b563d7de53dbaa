"""Loading of a checkpoint as a model that runs. Its file format is the hub's affair."""

from __future__ import annotations

from functools import partial

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.model.expert_layers import ExpertLayers
from penstock.model.families import FAMILIES
from penstock.model.layers import CausalLM, Progress
from penstock.model.ops import Ops
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import Ranks, SingleRank
from penstock.model.stages import Stage
from penstock.model.upload import Upload
from penstock.model.weights import Packed, Quantize, Site, Weights, read_stored


def load_model(
    checkpoint: Checkpoint,
    ops: Ops,
    *,
    quantize: Quantize | None = None,
    progress: Progress | None = None,
    max_context: int | None = None,
    sites: list[Site] | None = None,
    ranks: Ranks | None = None,
    experts: ExpertLayers | None = None,
    stage: Stage = Stage(),  # noqa: B008 (frozen)
    packed: Packed | None = None,
) -> CausalLM:
    """Layer by layer, so that memory peaks a few layers above the packed size; `progress` is told after each.

    `quantize` makes of each linear's weight what is kept; without it, they are kept as stored. `max_context` is the
    longest that a sequence may become, where that is less than the model can. Each linear layer is added to `sites`.
    `ranks`: those that share the model, of which this loads one's part; None: there is one. `experts`: where those of a
    mixture are counted, and how whole ones are shared out (expert parallel); None: nobody counts, and each is split
    (tensor parallel). `stage`: the layers that are loaded (pipeline parallel). `packed`: where linear layers may be
    found that were packed before.
    """
    architecture = checkpoint.config.architecture
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelUnsupported(f"architecture '{architecture}' is not supported; those that are: {known}")
    upload = Upload()
    read = (
        checkpoint.draw if isinstance(checkpoint, RandomCheckpoint) else partial(read_stored, checkpoint, move=upload)
    )
    weights = Weights(
        checkpoint,
        read,
        ops,
        checkpoint.tensor_names(),
        quantize or (lambda weight: weight),
        max_context=max_context,
        sites=sites if sites is not None else [],
        ranks=ranks or SingleRank(),
        experts=experts,
        stage=stage,
        packed=packed,
    )
    model = family(weights, progress or (lambda done, total: None))
    upload.release()  # experts may be read again later
    return model


def random_model(config: ModelConfig, ops: Ops, seed: int = 0, quantize: Quantize | None = None) -> CausalLM:
    """A model of this shape that says nothing sensible, for benches and tests."""
    return load_model(RandomCheckpoint(config, seed), ops, quantize=quantize)
