"""Inference engines of the sampler."""
