"""Load generation and reports: what a server of any make does under a known load, seen through its HTTP API alone."""
