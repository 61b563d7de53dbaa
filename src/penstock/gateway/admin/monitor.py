"""Objectives, alerts, probes and speeds in the admin API: docs/slo.md has their form."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.admin.resources import Shape
from penstock.gateway.admin.routes import View
from penstock.gateway.monitor.monitor import Monitor


def watch_views(tower: Monitor) -> Mapping[Shape, View]:
    return {
        ("slo",): lambda call: tower.slo(),
        ("alerts",): lambda call: tower.alerts(),
        ("probes",): lambda call: tower.probes(),
        ("speeds",): lambda call: tower.speeds(),
    }
