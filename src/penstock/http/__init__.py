"""HTTP/1.1 on both sides of the gateway, as protocols on the event loop: no framework, no task and no await per chunk.

It knows connections, messages and bytes. It does not know tenants, models, replicas' health or what the bytes mean;
the one thing it looks at is where a server-sent event ends.
"""
