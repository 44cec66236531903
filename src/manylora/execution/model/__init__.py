"""The base model: found, loaded, described, and its linear modules replaced by ones that apply adapters."""
