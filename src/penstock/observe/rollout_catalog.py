"""Every metric of rollouts. Gateways export them from the store, each the same: take `max by (model)`."""

from __future__ import annotations

from penstock.observe.catalog import Metric

_MODEL = ("model",)

PHASE = Metric(
    "penstock_rollout_phase",
    "gauge",
    "1 for the phase of a rollout that is on: waiting, watching, paused, holding or aborting.",
    (*_MODEL, "phase"),
)
STEP = Metric("penstock_rollout_step", "gauge", "Step of a rollout that is on; the first is 1.", _MODEL)
SHARE = Metric("penstock_rollout_share", "gauge", "Share of clients that the step sends to the new version.", _MODEL)
GATES = Metric(
    "penstock_rollout_gates",
    "gauge",
    "Gates of the step by verdict: better, equal, worse, undecided.",
    (*_MODEL, "verdict"),
)
ENDED = Metric(
    "penstock_rollouts_ended",
    "gauge",
    "Rollouts of a model that the store keeps and that are over, by how they ended: promoted or aborted.",
    (*_MODEL, "outcome"),
)

ROLLOUT_CATALOG = (PHASE, STEP, SHARE, GATES, ENDED)
