"""Rule-based routing: a request for a model that is chosen by rules gets the route that the rules say."""

from __future__ import annotations

import logging
from collections.abc import Container

from penstock.core.config import shown
from penstock.core.errors import ModelNotFound
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.proxy.ruling import Ruling
from penstock.router.routes import RouteTable
from penstock.router.rules import Facts

log = logging.getLogger(__name__)


def ruled(routed: RoutedRequest, facts: Facts, routes: RouteTable, models: Container[str]) -> RoutedRequest:
    """`models`: those that the tenant may use. One that may not use what is chosen is told of no such model."""
    rules = routed.route.rules
    assert rules is not None
    verdict = rules.decide(facts, models)
    for rule in verdict.failed:
        log.warning("the scoring function of rule '%s' of '%s' failed", rule, routed.route.name)
    chosen, default = routes.find(verdict.to), routes.find(rules.default)
    taken = default if rules.dry_run else chosen
    if taken.model not in models:
        raise ModelNotFound(f"no model '{shown(routed.view.model)}'", param="model")
    bucket = routed.bucket
    pools = default.target(bucket).pool, chosen.target(bucket).pool
    ruling = Ruling(routed.route.name, verdict, rules.dry_run, rules.default, *pools)
    return routed.ruled(taken, ruling)
