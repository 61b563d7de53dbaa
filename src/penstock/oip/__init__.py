"""The Open Inference Protocol, over gRPC and HTTP: its calls become requests to an application in the same process.

Keys, limits, routing and failover are the application's; this package knows none of them."""
