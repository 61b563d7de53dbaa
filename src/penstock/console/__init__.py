"""The console, a web page of a gateway or of a single replica. The page itself is in `web/`."""
