"""Tiny tokenizers of the three families that matter, made in memory: no files, no network."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from manylora.serving.text import Tokenizer

CORPUS = ["hello world, this is text", "the quick brown fox", "naïve café 世界 🙂 ünïcode", "STOP here </s> END"] * 5
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _byte_level() -> FastTokenizer:
    """GPT-2, Llama 3, Qwen: BPE over bytes."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return fast


def _byte_fallback() -> FastTokenizer:
    """Llama 2, Mistral, Gemma: a mark for spaces, unknown characters as byte tokens."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = FastTokenizer(models.BPE())
    trained.normalizer = spaces
    trained.train_from_iterator(
        ["hello world, this is text", "the quick brown fox"] * 5, trainers.BpeTrainer(vocab_size=70)
    )
    learnt = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    fast = FastTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = spaces
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast


def _characters() -> FastTokenizer:
    """One token per character, as the demo models have."""
    characters = sorted({char for line in CORPUS for char in line})
    fast = FastTokenizer(models.WordLevel({"<unk>": 0} | {c: i + 1 for i, c in enumerate(characters)}, "<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    return fast


MAKERS = {"byte_level": _byte_level, "byte_fallback": _byte_fallback, "characters": _characters}


def make_huggingface(kind: str, *, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Make a transformers tokenizer that puts ``<s>`` in front of a text."""
    fast = MAKERS[kind]()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    start = fast.token_to_id("<s>")
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    hf = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    return hf


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    """Make ours around it, once."""
    return Tokenizer(make_huggingface(kind), kind)
