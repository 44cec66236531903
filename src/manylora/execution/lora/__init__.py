"""LoRA products of a mixed batch: which rows take which adapter, and the kernel families that compute them."""
