"""The admin API and /metrics as an application: who may, which resource, and the answer as JSON.

The store blocks, so what is asked of it runs in one thread of its own, one request after another, and never on the
event loop; how the gateway stands is read on the loop, at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from penstock.core.errors import ConfigError, InvalidValue, MethodNotAllowed, NotFound, Overloaded, PenstockError
from penstock.gateway.admin.fleet import FLEET_RESOURCES
from penstock.gateway.admin.guard import Guard
from penstock.gateway.admin.models import MODEL_RESOURCES, PREFIX
from penstock.gateway.admin.replicas import REPLICA_RESOURCES
from penstock.gateway.admin.resources import RESOURCES, Action, AdminCall, Answer, Shape
from penstock.gateway.admin.rollouts import ROLLOUT_RESOURCES
from penstock.gateway.admin.routes import ROUTE_RESOURCES, View
from penstock.gateway.monitor.state import GatewayState
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.http.exchange import Exchange
from penstock.http.message import JSON, Request, render
from penstock.observe.registry import CONTENT_TYPE
from penstock.tenancy.store import Store

log = logging.getLogger("penstock.gateway.admin")

_RESOURCES = RESOURCES | ROUTE_RESOURCES | ROLLOUT_RESOURCES | REPLICA_RESOURCES | FLEET_RESOURCES | MODEL_RESOURCES
_MAX_PENDING = 64
_TEXT = render([(b"content-type", CONTENT_TYPE.encode())])
_NO_STORE = render([(b"cache-control", b"no-store")])  # a new key is among the answers


class AdminApi:
    def __init__(
        self,
        store: Store,
        guard: Guard,
        recorder: GatewayRecorder,
        look: Callable[[], GatewayState],
        routes: Mapping[Shape, View],
        *,
        has_own_port: bool,
        reload: Callable[[], list[str]] | None = None,
        merge: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """`routes`: what can be seen of them. `has_own_port`: whoever reaches it may read the metrics; beside the
        models' routes a key is asked for. `reload`: reads the configuration again and returns what has changed.
        `merge`: puts this process's metrics together with those of its siblings, in a thread."""
        self._store = store
        self._guard = guard
        self._recorder = recorder
        self._look = look
        self._live: dict[Shape, View] = {
            ("replicas",): lambda call: {"replicas": look().replicas},
            ("queues",): lambda call: {"queues": look().queues},
            **routes,
        }
        self._has_own_port = has_own_port
        self._reload = reload
        self._merge = merge
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="admin")
        self._num_pending = 0

    @staticmethod
    def owns(target: bytes) -> bool:
        return target.startswith((b"/admin/", b"/metrics", PREFIX))

    def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path == b"/metrics":
            self._metrics(exchange)
        elif is_administration(request.path):
            admin = self._guard.check(request)
            name = "-" if admin is None else admin.name
            self._administer(exchange, AdminCall(request, name, self._in_flight(request)))
        elif request.path == b"/health":
            exchange.respond(200, JSON, b'{"status":"ok"}')
        else:
            raise NotFound(f"no such path: {request.path.decode(errors='replace')}")

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- resources

    def _in_flight(self, request: Request) -> Mapping[str, int]:
        """Requests in flight by pool, for orders about models: the store's figures are up to a second old."""
        found = Counter[str]()
        if request.method == b"POST" and request.path.startswith(PREFIX):
            for one in self._look().replicas:
                found[one.model] += one.in_flight
        return found

    def _administer(self, exchange: Exchange, call: AdminCall) -> None:
        if call.shape == ("reload",) and call.method == "POST" and self._reload is not None:
            try:
                _respond(exchange, Answer(200, {"changed": self._reload()}))
            except ConfigError as error:
                raise InvalidValue(error.message, param=error.param) from None
            log.info("admin=%s reloaded the configuration", call.admin)
            return
        live, actions = self._live.get(call.shape), _RESOURCES.get(call.shape, {})
        is_readable = all(part.isprintable() for part in call.path)  # databases differ in what they make of a NUL
        if not (live or actions) or not is_readable:
            raise NotFound(f"no such path: {exchange.request.path.decode(errors='replace')}")
        if live is not None and call.method == "GET":
            _respond(exchange, Answer(200, live(call)))
        elif call.method in actions:
            self._in_thread(exchange, call, actions[call.method])
        else:
            raise MethodNotAllowed(f"this path takes {', '.join([*(['GET'] if live else []), *actions])}")

    def _in_thread(self, exchange: Exchange, call: AdminCall, action: Action) -> None:
        if self._num_pending >= _MAX_PENDING:
            raise Overloaded("too many admin requests wait for the store", retry_after_s=1.0)
        self._num_pending += 1

        def done(future: asyncio.Future[Answer]) -> None:
            self._num_pending -= 1
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                _respond(exchange, future.result())
            elif isinstance(error, PenstockError):
                exchange.refuse(error)
            else:
                log.error("the admin API failed on %s %s", call.method, exchange.request.path, exc_info=error)
                exchange.refuse(PenstockError("internal error"))
            if call.method != "GET":
                outcome = "done" if error is None else getattr(error, "code", PenstockError.code)
                path = exchange.request.path.decode(errors="replace")  # as it came: a decoded one may hold line ends
                log.info("admin=%s %s %s: %s", call.admin, call.method, path, outcome)

        work = asyncio.get_running_loop().run_in_executor(self._thread, action, self._store, call)
        work.add_done_callback(done)

    # -- metrics

    def _metrics(self, exchange: Exchange) -> None:
        if not self._has_own_port:
            self._guard.check(exchange.request)
        if exchange.request.method not in (b"GET", b"HEAD"):
            raise MethodNotAllowed("/metrics takes GET")
        self._recorder.look(self._look())
        # Thousands of lines: not on the loop, and not behind a store that may hang.
        text = asyncio.get_running_loop().run_in_executor(None, self._render)
        text.add_done_callback(lambda done: exchange.respond(200, _TEXT, done.result()))

    def _render(self) -> bytes:
        text = self._recorder.render()
        return text if self._merge is None else self._merge(text)


def is_administration(path: bytes) -> bool:
    """Whether a request for this path is an admin's."""
    return path.startswith(b"/admin/v1/") or path == PREFIX or path.startswith(PREFIX + b"/")


def _respond(exchange: Exchange, answer: Answer) -> None:
    body = b"" if answer.document is None else msgspec.json.encode(answer.document)
    exchange.respond(answer.status, JSON + _NO_STORE, body)
