"""Storage of weights and KV: the page tensor, adapters on the device, the host tier, and the readers that fill it."""
