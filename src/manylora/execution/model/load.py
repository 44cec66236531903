"""Load a Hugging Face causal language model so that it runs on flat batches with our attention."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError, ManyloraError
from manylora.execution.attention.call import ATTENTION_NAME, register_attention
from manylora.execution.device import find_device
from manylora.execution.model.checkpoint import CheckpointFiles, check_checkpoint, hide_load_report

__all__ = ["LoadedModel", "context_limit", "load_model", "load_skeleton"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Rotary embeddings whose frequencies change once any position of the *batch* passes the trained length: one long
# sequence would change the others, so such models are served up to that length.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

MAX_REASON_CHARS = 200
"""Most characters of a library's own error in a message."""

_FIXED_ATTENTION = (
    "which is not supported: its attention is part of the layer's code in transformers, and cannot be replaced by "
    "attention over pages"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A module tree of transformers with our attention.

    Args:
        name: Folder or hub name of its checkpoint.
        model: The causal language model, in evaluation mode; its weights may still be in main memory, or missing.
        text_config: The part of its configuration that describes the decoder.
        files: The files that its weights were read from, if they were.
    """

    name: str
    model: nn.Module
    text_config: Any
    dtype: torch.dtype
    device: torch.device
    files: CheckpointFiles | None = None


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the base model into main memory.

    Raises:
        ConfigError: The model does not exist or cannot be served.
    """

    def read(checkpoint: Any, options: dict[str, Any]) -> tuple[Any, CheckpointFiles]:
        files = CheckpointFiles.read(config.model, config.revision, getattr(checkpoint, "transformers_weights", None))
        hide_load_report()
        model, differences = AutoModelForCausalLM.from_pretrained(
            config.model,
            revision=config.revision,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported in place of raised
            **options,
        )
        files.check_loaded(model, differences)
        return model, files

    return _load(config, read)


def load_skeleton(config: ModelConfig) -> LoadedModel:
    """Build the same model without reading its weights: every tensor is on the ``meta`` device.

    Raises:
        ConfigError: The model does not exist or cannot be served.
    """

    def build(checkpoint: Any, options: dict[str, Any]) -> tuple[Any, None]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(checkpoint, **options)
        with suppress(OSError):  # without the file, the model's configuration applies
            model.generation_config = GenerationConfig.from_pretrained(config.model, revision=config.revision)
        return model, None

    return _load(config, build)


def _load(
    config: ModelConfig, make: Callable[[Any, dict[str, Any]], tuple[Any, CheckpointFiles | None]]
) -> LoadedModel:
    """Make the module tree from a checkpoint's configuration and options; check that its attention can be replaced."""
    check_checkpoint(config.model, config.revision)
    register_attention()
    device = find_device(config.device)
    got = f"Got model = {config.model!r}"
    try:
        checkpoint = AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        text_config = checkpoint.get_text_config()
    except Exception as error:  # broken configurations raise many kinds
        raise ConfigError(f"{got}: config.json cannot be read: {_reason(error)}") from error
    got += f" of type {checkpoint.model_type!r}"
    if getattr(checkpoint, "is_encoder_decoder", False):
        raise ConfigError(f"{got}: encoder-decoder models are not supported")
    dtype = _dtype(config.dtype, text_config, device)
    options = {"trust_remote_code": config.trust_remote_code, "dtype": dtype, "attn_implementation": ATTENTION_NAME}
    transformers_logging.disable_progress_bar()
    try:
        model, files = make(checkpoint, options)
    except ManyloraError:
        raise
    except Exception as error:  # so do wrong numbers in them
        if "automatic conversion of the weights" in str(error):  # its report, which is hidden, has pages
            raise ConfigError(
                f"{got}: tensors of its files do not merge into the model's (as experts do): "
                "one is missing, or has another shape"
            ) from error
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise ConfigError(f"{got}, {_FIXED_ATTENTION}") from error
        raise ConfigError(f"{got}, which cannot be loaded: {_reason(error)}") from error
    if not model._supports_attention_backend:
        raise ConfigError(f"{got}, {_FIXED_ATTENTION}")
    model.requires_grad_(False)
    return LoadedModel(
        name=config.model,
        model=model.eval(),
        text_config=model.config.get_text_config(),
        dtype=dtype,
        device=device,
        files=files,
    )


def _reason(error: Exception) -> str:
    """Return a library's message in one line; it may be paragraphs, or a word that means little without its kind."""
    text = textwrap.shorten(str(error), MAX_REASON_CHARS)
    return text if isinstance(error, OSError | ValueError | ImportError) and text else f"{type(error).__name__}: {text}"


def context_limit(text_config: Any) -> int:
    """Return the longest context, in tokens, that the model was trained for and that may share a batch."""
    limit = int(text_config.max_position_embeddings)
    rope = getattr(text_config, "rope_parameters", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for variant in variants:
        if variant.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            trained = int(
                variant.get("original_max_position_embeddings")
                or getattr(text_config, "original_max_position_embeddings", None)
                or limit
            )
            if trained < limit:
                logger.warning("context_limited rope_type=%s max_model_len=%d", variant["rope_type"], trained)
                limit = trained
    return limit


def _dtype(name: str, text_config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = text_config.dtype
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16
