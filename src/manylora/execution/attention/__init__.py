"""Attention over paged KV, for prompts and decoding, on torch, compiled CPU kernels or Triton."""
