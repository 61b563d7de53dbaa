"""Checks of an installation: the machine, a model, a configuration, and what a gateway needs around it."""
