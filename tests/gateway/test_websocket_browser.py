"""A page in Chromium that chats over a WebSocket, with its key as a subprotocol or in the first message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.console.browser import chromium, opened
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "the first and the second"}]
CHAT = """([url, protocols, key, body]) => new Promise(resolve => {
  const socket = new WebSocket(url, protocols), found = {text: "", kinds: []};
  const ask = () => socket.send(JSON.stringify({type: "request", id: "a", body}));
  socket.onopen = () => key ? socket.send(JSON.stringify({type: "auth", key})) : ask();
  socket.onmessage = event => {
    const message = JSON.parse(event.data);
    found.kinds.push(message.type);
    if (message.type === "authenticated") ask();
    if (message.type === "chunk") found.text += message.data.choices[0]?.delta.content ?? "";
    if (message.type === "done" || message.type === "error") socket.close(1000);
  };
  socket.onclose = event => resolve({...found, code: event.code, protocol: socket.protocol});
})"""


@pytest.fixture(scope="module")
def gateway(replica_at_hand: Replica) -> Iterator[RunningGateway]:
    with running_gateway(replica_at_hand) as found:
        found.add_tenant("nobody")
        yield found


def test_a_page_chats(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    key = gateway.add_tenant("page")
    body = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 12, "stream": True}
    url = f"ws://127.0.0.1:{gateway.port}/v1/chat/completions"

    def chat(page: Any, protocols: list[str], key: str = "") -> Any:
        return page.evaluate(CHAT, [url, protocols, key, body])

    with chromium() as browser:
        with opened(browser, f"{gateway.url}/health") as page:  # of the gateway's own origin
            by_protocol = chat(page, ["penstock.v1", f"bearer.{key}"])
            assert (by_protocol["text"], by_protocol["code"]) == (replica_at_hand.answer(QUESTION, 12), 1000)
            assert (by_protocol["protocol"], by_protocol["kinds"][-1]) == ("penstock.v1", "done")
            by_message = chat(page, [], key)
            assert (by_message["text"], by_message["kinds"][:2]) == (by_protocol["text"], ["authenticated", "started"])
            assert chat(page, [], "psk_wrong")["code"] == 1008
        with opened(browser, f"http://localhost:{gateway.port}/health") as page:  # of another one
            assert chat(page, ["penstock.v1", f"bearer.{key}"])["code"] == 1006
