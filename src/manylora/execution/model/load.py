"""Load a Hugging Face causal language model so that it runs on flat batches with our attention."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.initialization import guard_torch_init_functions
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError, ManyloraError
from manylora.execution.attention.call import ATTENTION_NAME, register_attention
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.checkpoint.files import is_gguf
from manylora.execution.checkpoint.open import Checkpoint, open_checkpoint, read_config
from manylora.execution.checkpoint.stored import one_line
from manylora.execution.collectives import Collectives
from manylora.execution.device import find_device
from manylora.execution.model.probe import ModelProbe, probe_model, stand_ins
from manylora.execution.model.recurrent import has_mixers
from manylora.execution.model.share import ModelShare, share_config

__all__ = ["LoadedModel", "auto_class", "context_limit", "load_model", "load_skeleton"]

logger = logging.getLogger(__name__)

# Rotary embeddings whose frequencies change once any position of the *batch* passes the trained length: one long
# sequence would change the others, so such models are served up to that length.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_FIXED_ATTENTION = (
    "which is not supported: its attention is part of the layer's code in transformers, and cannot be replaced by "
    "attention over pages"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A module tree of transformers with our attention."""

    name: str  # folder or hub name of its checkpoint
    # The causal language model, in evaluation mode; its weights may be missing.
    model: nn.Module
    text_config: Any  # the part of its configuration that describes the decoder
    dtype: torch.dtype
    device: torch.device
    checkpoint: Checkpoint | None = None  # the files that its weights, which are missing, are to be read from
    share: ModelShare | None = None  # of several workers, how ``model`` is this one's part of the whole

    def read(self, name: str) -> Codes | torch.Tensor:
        """Return a weight of the checkpoint as it is stored; as ``Checkpoint.linear``."""
        assert self.checkpoint is not None
        weight = self.checkpoint.linear(name)
        return weight if self.share is None else self.share.cut(name, weight)

    def probe(self) -> ModelProbe:
        """Find out how the model behaves, without its weights; ``ConfigError`` if it cannot be served."""
        config = self.text_config
        try:
            with stand_ins(self.model):
                return probe_model(self.model, architecture=config.model_type, num_layers=config.num_hidden_layers)
        except ConfigError as error:
            if self.share is None:
                raise
            got = f"Got tensor_parallel_size = {self.share.size}, but the model cannot be divided so"
            raise ConfigError(f"{got}. A worker's share of it: {error}") from error


def load_model(config: ModelConfig, workers: Collectives | None = None) -> LoadedModel:
    """Open the base model, whose weights are read one at a time later; of several workers, this one's share of it.

    ``ConfigError`` if the model does not exist or cannot be served.
    """
    builder = _Builder(config)
    checkpoint = open_checkpoint(
        config.model, config.revision, trust_remote_code=config.trust_remote_code, build=builder.build
    )
    part, share = checkpoint.skeleton, None
    if workers is not None:
        part = builder.build(share_config(checkpoint.config, workers.size))
        share = ModelShare.of(checkpoint.skeleton, part, workers.rank, workers.size)
    return builder.loaded(part, checkpoint=checkpoint, share=share)


def load_skeleton(config: ModelConfig) -> LoadedModel:
    """Build the same model without reading its weights: every tensor is on the ``meta`` device.

    ``ConfigError`` if the model does not exist or cannot be served.
    """

    def empty(checkpoint: Any, options: dict[str, Any]) -> Any:
        return _without_weights(checkpoint, options).to("meta")

    builder = _Builder(config)
    checkpoint, _ = read_config(config.model, config.revision, trust_remote_code=config.trust_remote_code)
    return builder.loaded(builder.build(checkpoint, empty))


def _without_weights(checkpoint: Any, options: dict[str, Any]) -> Any:
    """Return the model with parameters on the ``meta`` device; its buffers, which no file holds, are computed."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            empty = self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)
            # No values are drawn for it, for which torch would import its compiler (see ``execution.imports``).
            empty._is_hf_initialized = True  # type: ignore[attr-defined]

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        with guard_torch_init_functions():
            model = auto_class(checkpoint).from_config(checkpoint, **options)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    plan = model._get_dtype_plan(options["dtype"])  # routers in float32 beside 16 bits, of some families
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (kept := next((plan[pattern] for pattern in plan if re.search(pattern, name)), None)) is not None:
            tensor.data = tensor.data.to(kept)
    return model


class _Builder:
    """Builds models of transformers from their configurations, and checks that their attention can be replaced."""

    def __init__(self, config: ModelConfig) -> None:
        register_attention()
        transformers_logging.disable_progress_bar()
        self._config = config
        self._device = find_device(config.device)
        self._dtype = torch.float32

    def build(self, checkpoint: Any, make: Callable[[Any, dict[str, Any]], Any] = _without_weights) -> Any:
        """Return the model that ``make`` returns for a configuration and options.

        ``ConfigError`` if the model cannot be served, or ``make`` raises anything.
        """
        config = self._config
        got = f"Got model = {config.model!r} of type {checkpoint.model_type!r}"
        if getattr(checkpoint, "is_encoder_decoder", False):
            raise ConfigError(f"{got}: encoder-decoder models are not supported")
        self._dtype = _dtype(config.dtype, checkpoint.get_text_config(), self._device)
        trust = config.trust_remote_code
        options = {"trust_remote_code": trust, "dtype": self._dtype, "attn_implementation": ATTENTION_NAME}
        if checkpoint.model_type == "falcon":
            from manylora.execution.model.falcon import plain_linears, register_falcon

            register_falcon(checkpoint)
        try:
            model = make(checkpoint, options)
        except ManyloraError:
            raise
        except Exception as error:  # wrong numbers in configurations raise many kinds
            if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
                raise ConfigError(f"{got}, {_FIXED_ATTENTION}") from error
            raise ConfigError(f"{got}, which cannot be loaded: {one_line(error)}") from error
        if model._is_stateful and not has_mixers(model):
            raise ConfigError(f"{got}, which is not supported: its layers keep a state that is not keys and values")
        if checkpoint.model_type == "falcon":
            plain_linears(model)
        elif not (model._supports_attention_backend or _calls_interface(model) or has_mixers(model)):
            raise ConfigError(f"{got}, {_FIXED_ATTENTION}")
        if not is_gguf(config.model):
            with suppress(OSError):  # without the file, the model's configuration applies
                model.generation_config = GenerationConfig.from_pretrained(config.model, revision=config.revision)
        return model

    def loaded(
        self, model: Any, *, checkpoint: Checkpoint | None = None, share: ModelShare | None = None
    ) -> LoadedModel:
        """Return a model that was built, without the parts that text does not use."""
        _make_linears(model)
        model.requires_grad_(False)
        if skipped := _drop_towers(model):
            logger.warning("text_only model=%s skipped=%s", self._config.model, ",".join(skipped))
        return LoadedModel(
            name=self._config.model,
            model=model.eval(),
            text_config=model.config.get_text_config(),
            dtype=self._dtype,
            device=self._device,
            checkpoint=checkpoint,
            share=share,
        )


def _drop_towers(model: Any) -> list[str]:
    """Drop what stands beside the decoder in a multimodal model, in place; return the names of these parts.

    They take no text, so their weights are not read, and adapters that change them are refused.
    """
    body, decoder = model.base_model, model.get_decoder()
    if model.config.get_text_config() is model.config or decoder is body:
        return []
    dropped = [name for name, part in body.named_children() if all(own is not decoder for own in part.modules())]
    for name in dropped:
        delattr(body, name)
    return dropped


def auto_class(checkpoint: Any) -> Any:
    """Return the class of transformers that builds the model of a configuration, of multimodal models too."""
    own = AutoModelForImageTextToText
    is_causal = type(checkpoint) in AutoModelForCausalLM._model_mapping or type(checkpoint) not in own._model_mapping
    return AutoModelForCausalLM if is_causal else own


def _calls_interface(model: nn.Module) -> bool:
    """Whether a layer looks attention up by its name, though its family does not say that it may be replaced."""
    forwards = (unwrap(type(module).forward) for module in model.modules() if hasattr(module, "layer_idx"))
    return any("ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names for forward in forwards)


def _make_linears(model: nn.Module) -> None:
    """Replace GPT-2's linears, whose weights are ``[in, out]``, in place by linears as all other models have them."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.nx, module.nf, device="meta")
            linear.weight, linear.bias = nn.Parameter(module.weight.t()), module.bias
            linear.is_transposed = True  # type: ignore[assignment]  # in files
            model.set_submodule(name, linear)


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
        own: torch.dtype = getattr(torch, name)
        return own
    if device.type == "cpu":
        return torch.float32
    own = text_config.dtype
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16
