"""Plain LoRA as PEFT writes it: settings, target modules, tensors."""
