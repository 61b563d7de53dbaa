"""Tenancy: tenants, keys, limits, budgets, usage, and the stores that keep them."""
