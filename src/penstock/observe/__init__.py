"""How facts leave a process: the metric catalog and its Prometheus form, and logs."""
