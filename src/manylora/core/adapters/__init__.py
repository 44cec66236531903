"""Adapters as PEFT saves them: where they are, checks, methods, identity by content, layout in pages."""
