"""Diffusion models and transformers for them, chapters 43 and 44."""
