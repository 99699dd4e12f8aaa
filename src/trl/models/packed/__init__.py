"""Batches as one flat row of segments or as padded rows, and the attention over them."""
