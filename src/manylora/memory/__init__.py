"""Memory: one pool of equal pages for KV, prefix blocks and adapters."""
