"""The engine's process: puts an engine together from its settings and runs its loop. The server starts it."""
