"""Engines that turn prompt ids into completion ids, with the log-probabilities of what they sampled."""
