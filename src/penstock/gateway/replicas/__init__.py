"""The replicas that a gateway knows.

replica_set         all of them, and who is told when one comes or goes
following           the connections that keep a gateway informed of each
snapshots           what admission is told of each
replica             one: how to reach it and what it last reported, if it is penstock's own
silence, probe      a replica that reports nothing any more; health checks
engine_poller       the state of a server of another make
dialect_upstream    requests in the dialect of such a server
fetch               a document from a replica
kv_follower, kv_sources, zmq_events     what KV caches hold: penstock's, and other engines'
lora, lora_routes   LoRA adapters at replicas, and the routes that they become
"""
