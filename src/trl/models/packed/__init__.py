"""Batches as one packed row of segments or as padded rows, and the attention over them."""
