"""The certificates of a running gateway: its own and those that it shows to replicas, read again on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence

from penstock.core.errors import ConfigError
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.settings.gateway import ModelSettings, tls_of
from penstock.http.tls import ServerTls

log = logging.getLogger("penstock.gateway")


class Certificates:
    def __init__(
        self,
        tls: ServerTls | None,
        replicas: Sequence[Replica],
        pools: Mapping[str, ModelSettings],
        recorder: GatewayRecorder,
    ) -> None:
        self._tls = tls
        self._replicas = replicas
        self._pools = {name: pool for name, pool in pools.items() if tls_of(name, pool) is not None}
        self._recorder = recorder
        self._tell()

    def reload_on_hangup(self) -> None:
        """Only where there are any: elsewhere a terminal that is closed ends the gateway, as it ends other programs."""
        if self._tls is not None or self._pools:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """New connections get the new ones; those that are open go on. Files that cannot be used change nothing."""
        try:
            contexts = {name: tls_of(name, pool) for name, pool in self._pools.items()}
            if self._tls is not None:
                self._tls.reload()
        except ConfigError as error:
            log.error("the certificates stay as they are: %s", error.message)
            return
        for replica in self._replicas:
            if replica.upstream.tls is not None and replica.model in contexts:
                replica.upstream.tls = contexts[replica.model]
        self._tell()
        log.info("the certificates were read again")

    def _tell(self) -> None:
        if self._tls is not None:
            self._recorder.has_certificate(self._tls.expires_at)
