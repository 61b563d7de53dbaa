"""The certificates of a running gateway: its own and those that it shows to replicas, read again on SIGHUP; its
own also when their files have changed."""

from __future__ import annotations

import logging
import ssl

from penstock.core.errors import ConfigError
from penstock.gateway.membership.membership import Membership
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.settings.gateway import tls_of
from penstock.http.tls import ServerTls

log = logging.getLogger("penstock.gateway")


class Certificates:
    def __init__(
        self,
        tls: ServerTls | None,
        replicas: ReplicaSet,
        membership: Membership,
        recorder: GatewayRecorder,
    ) -> None:
        self._tls = tls
        self._replicas = replicas
        self._membership = membership
        self._recorder = recorder
        if tls is not None:
            tls.renewed = self._tell
        self._tell()

    @property
    def has_any(self) -> bool:
        return self._tls is not None or bool(self._contexts())

    def _contexts(self) -> dict[str, ssl.SSLContext]:
        """TLS contexts of the pools that have certificates of their own, by name."""
        pools = self._membership.pools.items()
        return {name: context for name, pool in pools if (context := tls_of(name, pool)) is not None}

    def reload(self) -> None:
        """New connections get the new ones; those that are open go on. Files that cannot be used change nothing."""
        try:
            contexts = self._contexts()
            if self._tls is not None:
                self._tls.reload()
        except ConfigError as error:
            log.error("the certificates stay as they are: %s", error.message)
            return
        for replica in self._replicas.values():
            if replica.upstream.tls is not None and replica.model in contexts:
                replica.upstream.tls = contexts[replica.model]
        if self._tls is not None or contexts:
            log.info("the certificates were read again")

    def _tell(self) -> None:
        if self._tls is not None:
            self._recorder.has_certificate(self._tls.expires_at)
