"""How good the accounts of docs/cost.md are: `python -m tools.cost`."""
