"""Log-probabilities, values and class logits in one forward pass, without the logits of the vocabulary."""
