"""The base model: finding, loading and describing it, and replacing its linears by ones that apply adapters."""
