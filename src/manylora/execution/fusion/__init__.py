"""Fewer launches for the same step: forwards of transformers modules replaced by fused ones with equal results."""
