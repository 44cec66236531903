"""Adapters: checkpoint formats, identity, layout in pages, names and tiers."""
