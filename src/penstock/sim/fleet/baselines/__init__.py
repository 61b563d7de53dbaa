"""Autoscaling policies to compare with: one file each, as their projects document them."""
