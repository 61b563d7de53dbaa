"""Who may use the service and how much: tenants, keys, limits, budgets, usage, and the stores that keep them."""
