"""The adapters of one engine: their copies on host and device, the operations by name, and prefetching."""
