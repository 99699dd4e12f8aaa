"""Rows to padded or packed tensors."""
