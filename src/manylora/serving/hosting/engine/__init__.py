"""The engine's side of a link: the process, its service, reads of adapters."""
