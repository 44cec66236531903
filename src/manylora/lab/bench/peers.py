"""Systems to compare with, in one process: transformers' ``generate``, and PEFT's with an adapter per row.

Both take static batches: prompts are padded to the longest, and every row runs until the longest answer is complete.
Only the tokens that were asked for count.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from manylora.core.errors import ConfigError

__all__ = ["PeerRequest", "Peft", "Transformers", "quiet"]


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One request: a prompt, and how many tokens to answer with."""

    prompt: tuple[int, ...]
    num_out: int


class Transformers:
    """`generate` of transformers.

    Args:
        model: Folder of the base.
        device: Device of the model.
        dtype: Its precision; as saved when ``None``.
    """

    def __init__(self, model: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
        self.device = torch.device(device)
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto")
            self.model: Any = loaded.eval().to(self.device)

    def run(self, asked: Sequence[PeerRequest], **options: Any) -> None:
        """Answer one batch; answers that are longer than asked are not counted by the caller."""
        longest = max(len(one.prompt) for one in asked)
        ids = torch.tensor([[0] * (longest - len(one.prompt)) + list(one.prompt) for one in asked])
        mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in asked])
        num_out = max(one.num_out for one in asked)
        with torch.inference_mode():
            self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=num_out,
                min_new_tokens=num_out,
                do_sample=False,
                **options,
            )

    def run_all(self, asked: Sequence[PeerRequest], batch_size: int = 32) -> None:
        """Answer in static batches."""
        for first in range(0, len(asked), batch_size):
            self.run(asked[first : first + batch_size])


class Peft(Transformers):
    """The same with PEFT's `adapter_names`.

    Args:
        model: Folder of the base.
        adapters: Folders of adapters with different names.
        device: Device of the model.
        dtype: Its precision; as saved when ``None``.

    Raises:
        ConfigError: PEFT is not installed.
    """

    def __init__(
        self, model: Path, adapters: Sequence[Path], *, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        try:
            from peft import PeftModel
        except ImportError:
            raise ConfigError("Comparing with PEFT needs it: pip install 'manylora[train]'") from None
        super().__init__(model, device=device, dtype=dtype)
        with quiet():
            self.model = PeftModel.from_pretrained(self.model, adapters[0], adapter_name=adapters[0].name)
            for folder in adapters[1:]:
                self.model.load_adapter(folder, adapter_name=folder.name)
            self.model.eval()
        self._names = [folder.name for folder in adapters]

    def run_mixed(self, asked: Sequence[PeerRequest], batch_size: int = 32) -> None:
        """Answer in static batches; request *i* takes adapter *i*, modulo their number."""
        names = [self._names[index % len(self._names)] for index in range(len(asked))]
        for first in range(0, len(asked), batch_size):
            self.run(asked[first : first + batch_size], adapter_names=names[first : first + batch_size])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and progress bars of PEFT and transformers."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
