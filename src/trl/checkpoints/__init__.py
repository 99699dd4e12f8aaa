"""Checkpoints: which are whole, which run they belong to, and which process may write or remove them."""
