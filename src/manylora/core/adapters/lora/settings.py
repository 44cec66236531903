"""The settings of LoRA in ``adapter_config.json``, by PEFT's names.

An unsupported setting that changes the arithmetic is refused by name, known or unknown, so that an adapter never
answers with a wrong scale or with half of its weights. Unknown keys (PEFT adds some with every release) are accepted as
long as their values are empty.

Source: PEFT 0.21, ``tuners/lora/config.py``, ``tuners/lora/layer.py`` (which initialisations change the base).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from manylora.core.adapters.folder import CONFIG_FILE, shown
from manylora.core.errors import AdapterError

__all__ = ["MAX_RANK", "LoraSettings", "parse_lora"]

MAX_RANK = 65_536
MAX_INVOCATION_TOKENS = 128

_REFUSED: Mapping[str, str] = {
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "Monte Carlo LoRA",
    "megatron_config": "Megatron layers",
    "ensure_weight_tying": "tied embedding and head adapters",
}
"""Settings that change the arithmetic, with their meaning."""

_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern"}
    | {"use_dora", "lora_bias", "trainable_token_indices", "modules_to_save", "alora_invocation_tokens"}
    | {"target_parameters"}
    | {"alpha_pattern", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"}
    | {"base_model_name_or_path", "task_type", "peft_version"}
)

_WITHOUT_EFFECT = frozenset(
    # Origin, training and initialisation, not arithmetic. ``fan_in_fan_out`` describes the storage of the *base*
    # weight; A and B are stored in one way. The configurations belong to initialisations, checked by
    # ``init_lora_weights``.
    {"inference_mode", "revision", "auto_mapping", "lora_dropout", "fan_in_fan_out", "megatron_core"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"}
    | {"lorap_lr_ratio", "lorap_emb_lr"}
)

_BASE_KEEPING_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""The other named initialisations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract from the base weight or quantise it,
so the adapter needs that modified base. PEFT can convert such an adapter, and then writes ``true`` here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The supported settings, by PEFT's names."""

    r: int  # rank of modules without a pattern
    lora_alpha: float  # numerator of the scale of modules without a pattern
    use_rslora: bool  # scale is alpha / sqrt(rank) instead of alpha / rank
    target_modules: tuple[str, ...] | str  # names, or one regular expression (or ``all-linear``)
    target_parameters: tuple[str, ...]  # ends of names of parameters that are targets beside modules
    exclude_modules: tuple[str, ...] | str  # names, or one regular expression, that are not targets
    rank_pattern: tuple[tuple[str, int], ...]  # pairs of pattern and rank; the first match counts
    alpha_pattern: tuple[tuple[str, float], ...]  # pairs of pattern and alpha
    layers_to_transform: tuple[int, ...] | None  # the only layers that are adapted; ``None`` means all
    layers_pattern: tuple[str, ...]  # names of the list of layers, from which a layer's index is read
    use_dora: bool = False  # whether each module has a magnitude
    lora_bias: bool = False  # whether ``lora_B`` has a bias
    bias: str = "none"  # which biases of the base were trained: ``none``, ``all`` or ``lora_only``
    # Pairs of a module and its trained tokens; the module is ``None`` for the embedding.
    tokens: tuple[tuple[str | None, tuple[int, ...]], ...] = ()
    saved: tuple[str, ...] = ()  # names of modules that were trained whole
    invocation: tuple[int, ...] = ()  # tokens that activate it (aLoRA); empty for an adapter that is always active


def parse_lora(name: str, config: Mapping[str, Any]) -> LoraSettings:
    """Return the settings in ``config``, the content of ``adapter_config.json``.

    ``AdapterError`` if the configuration is malformed or unsupported; names the adapter ``name``.
    """
    return _Parser(name, config).parse()


class _Parser:
    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self._name = name
        self._fields = fields

    def parse(self) -> LoraSettings:
        self._refuse_unsupported()
        for key in ("base_model_name_or_path", "task_type"):  # shown to users (``report``)
            self._text(key)
        target_modules = self._names("target_modules")
        layers = self._layers()
        layers_pattern = self._names("layers_pattern")
        target_parameters = self._names("target_parameters")
        if isinstance(target_parameters, str):
            self._fail(f"target_parameters is {shown(target_parameters)}, expected a list of names")
        if not target_modules and not target_parameters:
            self._fail("target_modules is empty, expected the names of the adapted modules")
        for key in ("use_dora", "lora_bias", "alora_invocation_tokens"):
            if target_parameters and self._fields.get(key):
                self._fail(f"target_parameters and {key} are both set, which PEFT does not support")
        if isinstance(target_modules, str) and (layers is not None or layers_pattern):
            self._fail("layers_to_transform and layers_pattern need target_modules to be a list of names")
        if layers_pattern and layers is None:
            self._fail("layers_pattern is given without layers_to_transform")
        return LoraSettings(
            r=self._rank("r", self._require("r")),
            lora_alpha=self._alpha("lora_alpha", self._require("lora_alpha")),
            use_rslora=self._flag("use_rslora"),
            target_modules=target_modules,
            target_parameters=target_parameters,
            exclude_modules=self._names("exclude_modules"),
            rank_pattern=tuple(
                (k, self._rank(f"rank_pattern[{shown(k)}]", v)) for k, v in self._mapping("rank_pattern")
            ),
            alpha_pattern=tuple(
                (k, self._alpha(f"alpha_pattern[{shown(k)}]", v)) for k, v in self._mapping("alpha_pattern")
            ),
            layers_to_transform=layers,
            layers_pattern=(layers_pattern,) if isinstance(layers_pattern, str) else layers_pattern,
            use_dora=self._flag("use_dora"),
            lora_bias=self._flag("lora_bias"),
            bias=self._text("bias") or "none",
            tokens=self._tokens(),
            saved=self._saved(),
            invocation=self._invocation(),
        )

    def _refuse_unsupported(self) -> None:
        peft_type = self._fields.get("peft_type")
        if peft_type != "LORA":
            self._fail(f"peft_type is {shown(peft_type)}, expected one of LORA, ADALORA, VERA, LOHA, LOKR, IA3")
        for key, meaning in _REFUSED.items():
            if self._fields.get(key):
                self._fail(f"{key} is set: {meaning} is not supported")
        bias = self._fields.get("bias") or "none"
        if bias not in ("none", "all", "lora_only"):
            self._fail(f"bias is {shown(bias)}, expected 'none', 'all' or 'lora_only'")
        if self._fields.get("use_dora") and self._fields.get("lora_bias"):
            self._fail("use_dora and lora_bias are both set, which PEFT does not support")
        init = self._fields.get("init_lora_weights", True)
        if not (
            init is None or isinstance(init, bool) or (isinstance(init, str) and init in _BASE_KEEPING_INITIALISATIONS)
        ):
            self._fail(
                f"init_lora_weights is {shown(init)}, which may change the base weights; "
                "convert the adapter to plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
            )
        known = _READ | _WITHOUT_EFFECT | _REFUSED.keys()
        for key, value in self._fields.items():
            if key not in known and value:
                self._fail(f"unknown setting {shown(key)} = {shown(value)} might change its results")

    def _fail(self, reason: str) -> NoReturn:
        raise AdapterError(self._name, f"{CONFIG_FILE}: {reason}")

    def _require(self, key: str) -> Any:
        if self._fields.get(key) is None:
            self._fail(f"{key} is missing")
        return self._fields[key]

    def _rank(self, what: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            self._fail(f"{what} is {shown(value)}, expected an integer from 1 to {MAX_RANK}")
        return value

    def _alpha(self, what: str, value: Any) -> float:
        # Zero would give the base's answers under the adapter's name.
        if type(value) not in (int, float) or not 0 < abs(value) <= 1e30:
            self._fail(f"{what} is {shown(value)}, expected a finite number that is not 0")
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self._fields.get(key)
        if value is not None and type(value) is not bool:
            self._fail(f"{key} is {shown(value)}, expected true or false")
        return bool(value)

    def _text(self, key: str) -> str | None:
        value = self._fields.get(key)
        if value is not None and not isinstance(value, str):
            self._fail(f"{key} is {shown(value)}, expected text")
        return value

    def _names(self, key: str) -> tuple[str, ...] | str:
        value = self._fields.get(key)
        if value is None:
            return ()
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(v, str) and v for v in value):
            return tuple(value)
        self._fail(f"{key} is {shown(value)}, expected text or a list of names")

    def _layers(self) -> tuple[int, ...] | None:
        value = self._fields.get("layers_to_transform")
        if value is None or value == []:
            return None
        layers = value if isinstance(value, list) else [value]
        if not all(type(v) is int for v in layers):
            self._fail(f"layers_to_transform is {shown(value)}, expected an integer or a list of integers")
        return tuple(layers)

    def _tokens(self) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
        value = self._fields.get("trainable_token_indices")
        if not value:
            return ()
        by_module = value.items() if isinstance(value, dict) else [(None, value)]
        for _, ids in by_module:
            is_valid = isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids)
            if not is_valid or len(set(ids)) != len(ids):
                self._fail(f"trainable_token_indices has {shown(ids)}, expected a list of different token ids")
        return tuple((module, tuple(ids)) for module, ids in by_module)

    def _saved(self) -> tuple[str, ...]:
        names = self._names("modules_to_save")
        return (names,) if isinstance(names, str) else names

    def _invocation(self) -> tuple[int, ...]:
        tokens = self._fields.get("alora_invocation_tokens")
        if not tokens:
            return ()
        is_valid = isinstance(tokens, list) and len(tokens) <= MAX_INVOCATION_TOKENS
        if not is_valid or not all(type(one) is int and 0 <= one < 2**31 for one in tokens):
            self._fail(
                f"alora_invocation_tokens is {shown(tokens)}, expected a list of 1 to {MAX_INVOCATION_TOKENS} token ids"
            )
        for key in ("use_dora", "trainable_token_indices", "modules_to_save"):
            if self._fields.get(key):
                self._fail(f"alora_invocation_tokens and {key} are both set: what {key} trains is not activated")
        if (self._fields.get("bias") or "none") != "none":
            self._fail("alora_invocation_tokens and bias are both set: a trained bias is not activated")
        return tuple(tokens)

    def _mapping(self, key: str) -> list[tuple[str, Any]]:
        value = self._fields.get(key)
        if value is None:
            return []
        if not isinstance(value, dict):
            self._fail(f"{key} is {shown(value)}, expected an object")
        return list(value.items())
