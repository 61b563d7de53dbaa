"""OpenAI itself and whatever speaks like it: nothing is known of how busy it is. And our own replicas.

A penstock replica pushes reports and takes what the gateway adds by itself (`gateway.replicas`, `api.relay`).
"""

from __future__ import annotations

from penstock.dialects.dialect import Dialect, Health, Sign

OPENAI = Dialect(name="openai", health=Health(b"/v1/models"))

PENSTOCK = Dialect(
    name="penstock",
    signs=(Sign(b'"owned_by":"penstock"', path="/v1/models"),),
    health=Health(deep=b"/health/deep", has_503_while_starting=True),
)
