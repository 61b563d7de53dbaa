"""The web page of a gateway, or of a single replica: what it shows, and how that comes to it. The page is in `web/`."""
