"""The Open Inference Protocol in front of an application: its calls, over gRPC and HTTP, become requests that are asked
inside the process. Keys, limits, routing and failover are the application's; this package knows none of them."""
