"""Telemetry of this process: what its settings and the environment's variables say."""

from __future__ import annotations

import logging
import os
import uuid

from penstock import __version__
from penstock.core.settings import TelemetrySettings
from penstock.observe.otlp.exporter import is_installed
from penstock.observe.otlp.target import Telemetry, telemetry

log = logging.getLogger("penstock.telemetry")


def telemetry_of(settings: TelemetrySettings, service: str) -> Telemetry:
    """The configuration that the settings and the environment come to. Raises ConfigError."""
    found = telemetry(settings, service, os.environ)
    if settings.endpoint is None and (found.traces or found.metrics) and not is_installed():
        # A machine may have these variables for other programs.
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is pushed: pip install 'penstock[otel]'")
        found = found._replace(traces=None, metrics=None)
    who = {
        "penstock.role": service.removeprefix("penstock-"),
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
    }
    return found._replace(resource=who | found.resource)
