"""manylora: serve hundreds to thousands of LoRA adapters of one base model from shared hardware."""
