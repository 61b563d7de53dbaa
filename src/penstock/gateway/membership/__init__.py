"""Discovery: which replicas there are. Each source is one file behind one protocol (`membership.Source`).

membership      keeps the `ReplicaSet` equal to what the sources name together
factory         replicas by the settings of their pool
file            the gateway's YAML
store           rows of the store, added by commands, the admin API or a controller
dns             A, AAAA and SRV records
kubernetes      pods of a Kubernetes cluster, by their labels
"""
