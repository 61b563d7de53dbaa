"""Puts an inquiry for a model that is chosen by rules on the route that the rules say."""

from __future__ import annotations

import logging
from collections.abc import Container

from penstock.core.config import shown
from penstock.core.errors import ModelNotFound
from penstock.gateway.proxy.routed_request import Inquiry
from penstock.gateway.proxy.rule_routing import Ruling
from penstock.router.routes import RouteTable
from penstock.router.rules import Facts

log = logging.getLogger(__name__)


def ruled(inquiry: Inquiry, facts: Facts, routes: RouteTable, models: Container[str]) -> Inquiry:
    """`models`: those that the tenant may use. One that may not use what is chosen is told of no such model."""
    rules = inquiry.route.rules
    assert rules is not None
    verdict = rules.decide(facts, models)
    for rule in verdict.failed:
        log.warning("the scoring function of rule '%s' of '%s' failed", rule, inquiry.route.name)
    chosen, default = routes.find(verdict.to), routes.find(rules.default)
    taken = default if rules.dry_run else chosen
    if taken.model not in models:
        raise ModelNotFound(f"no model '{shown(inquiry.asked.model)}'", param="model")
    lot = inquiry.lot
    ruling = Ruling(inquiry.route.name, verdict, rules.dry_run, rules.default, default.pool(lot), chosen.pool(lot))
    return inquiry.ruled(taken, ruling)
