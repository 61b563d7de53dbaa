"""A Kubernetes cluster for tests, without containers: a real control plane, and node agents of our own."""
