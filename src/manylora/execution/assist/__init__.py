"""CPU-assisted LoRA: workers on the CPU compute adapters that are not on the device, beside its base product."""
