"""Demo models that ship with the package: one tiny base model and twelve LoRA adapters with checkable answers.

The functions here return the paths of the files (`demo_model_path`, `demo_adapters`) and check answers (`TASKS`,
`check`); they import no torch. In a checkout `python bench/demo_train.py` trains the models again.
"""

from __future__ import annotations

from pathlib import Path

from manylora.demo.tasks import EXAMPLE_PROMPTS, TASKS, DemoTask, check

__all__ = ["EXAMPLE_PROMPTS", "TASKS", "DemoTask", "check", "demo_adapters", "demo_model_path"]

_ASSETS = Path(__file__).parent / "assets"


def demo_model_path() -> Path:
    """Return the folder of the demo base model: config, tokenizer and weights, as `from_pretrained` reads them."""
    return _ASSETS / "base"


def demo_adapters() -> dict[str, Path]:
    """Return the folder of every demo adapter in PEFT's format, by name, in alphabetical order."""
    return {folder.parent.name: folder.parent for folder in sorted(_ASSETS.glob("adapters/*/adapter_config.json"))}
