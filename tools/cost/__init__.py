"""The quality of the accounts of docs/cost.md: `python -m tools.cost`."""
