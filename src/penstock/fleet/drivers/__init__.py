"""Drivers: one file for each place where replicas run, behind one protocol (`driver.Driver`)."""
