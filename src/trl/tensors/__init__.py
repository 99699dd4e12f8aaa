"""Masking, padding, token log-probabilities and reductions: torch only, no state."""
