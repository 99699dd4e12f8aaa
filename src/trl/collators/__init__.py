"""Rows to padded or flat tensors."""
