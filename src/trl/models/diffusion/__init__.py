"""Diffusion models as policies: pipelines that return log-probabilities of their denoising steps."""
