"""gRPC on the server's side: messages made from tables, TLS, health checks and reflection. Needs grpcio."""
