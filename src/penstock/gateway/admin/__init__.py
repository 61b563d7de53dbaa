"""The admin API: tenants, keys and usage over HTTP, and how the gateway stands. It decides nothing: the store does."""
