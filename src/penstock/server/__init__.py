"""One replica over HTTP: OpenAI routes, health, metrics. It is handed an engine client and never sees a tensor."""
