"""Variants that are still moving, and the 0.26 import paths."""
