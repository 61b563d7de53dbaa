"""One replica over HTTP: both APIs, health, metrics. It is handed an engine client and never sees a tensor."""
