"""The tokenizer: text to ids, chats to ids, ids to text.

Wraps a Hugging Face fast tokenizer and uses only calls that do not change its Rust core, so that one instance serves
every thread. (The ``__call__`` of transformers sets truncation on the shared core each time, and raises "Already
borrowed" under load.)
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from manylora.core.errors import ConfigError, ContextExceeded, RequestError
from manylora.execution.checkpoint.files import check_checkpoint
from manylora.serving.text.model_files import load_hugging_face
from manylora.serving.text.pieces import BytePieces, DecodedPieces, TextPieces, TokenBytes, byte_tables

__all__ = ["Tokenizer"]

MAX_TOKEN_ID = 2**32 - 1

CHARS_AT_ONCE = 8
"""A text of up to so many characters per token of its limit is tokenized at once, a longer one in slices first."""

CUT_TOKENS = 64  # most tokens that a cut between two slices is taken to add
MAX_REASON_CHARS = 300  # most characters of a template's own error in a message: it may quote the conversation

_TEMPLATE_ARGUMENTS = frozenset({"tools", "documents"})
"""Arguments of ``apply_chat_template`` that callers may set; the others change the kind of its result."""

_PLACES = frozenset({"vocab_file", "merges_file", "tokenizer_file", "name_or_path", "is_local", "local_files_only"})
"""Settings that say where a tokenizer was found."""

_TEMPLATE_NAMES = frozenset({"self", "messages", "conversations", "kwargs", "compiled_template"})
"""Names that the renderer gives to a template by itself."""


class Tokenizer:
    """Turn text and chats into token ids and back; safe to share between threads.

    ``hf`` is a ``PreTrainedTokenizerFast``, which nothing else may use afterwards.
    """

    def __init__(self, hf: Any, name: str) -> None:
        if not getattr(hf, "is_fast", False):
            raise ConfigError(f"Got a slow tokenizer {type(hf).__name__} from {name!r}, expected a fast one")
        self._hf = hf
        self._fast: FastTokenizer = hf.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._token_bytes = TokenBytes(self._fast)
        self._tables = byte_tables(self._fast)
        vocab = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1  # with added tokens; the model's embedding may be larger
        self._longest_token = max(map(len, vocab), default=1)
        own = inspect.signature(hf.apply_chat_template).parameters
        self._reserved = (frozenset(own) | _TEMPLATE_NAMES) - _TEMPLATE_ARGUMENTS

    @classmethod
    def load(
        cls, path_or_name: str | Path, *, revision: str | None = None, chat_template: str | None = None
    ) -> Tokenizer:
        """Load a tokenizer from a directory or, with a network, from the hub; ``chat_template`` replaces its own.

        ``ConfigError`` if the tokenizer is missing, unreadable, or not a fast one.
        """
        name = str(path_or_name)
        check_checkpoint(name, revision)
        is_folder = Path(name).is_dir()
        if is_folder and not any(Path(name).glob("*token*")):
            raise ConfigError(f"Got no tokenizer from {name!r}: none of its files is a tokenizer's")
        try:
            hf = load_hugging_face(name, revision)
        except Exception as error:  # broken tokenizer files raise many kinds
            place = "" if is_folder else "from the hub: "
            # The loader's messages are paragraphs; the first line has the reason.
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(f"Got no tokenizer from {name!r}: {place}{reason}") from error
        if chat_template is not None:
            hf.chat_template = chat_template
        return cls(hf, name)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it has one; the model may know more."""
        return () if self._hf.eos_token_id is None else (int(self._hf.eos_token_id),)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; of several the default one."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return None if template is None else str(template)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary."""
        found: int | None = self._fast.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens written out in it are recognised.

        With ``add_special_tokens`` the model's tokens (mostly a beginning-of-sequence token) are added around it.
        ``RequestError`` if it is not valid Unicode (a lone surrogate).
        """
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_within(self, text: str, limit: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text as ``encode`` does, or raise ``ContextExceeded`` if it has ``limit`` or more.

        The cost is bounded by the limit, not by the text: a text that is too long by its characters is refused at
        once, and one that is by its tokens after a slice or a few. Other threads run meanwhile.
        """
        self.check_chars(len(text), limit)
        stride = CHARS_AT_ONCE * limit
        if len(text) > stride:
            num_tokens = 0
            for start in range(0, len(text), stride):
                num_tokens += len(self._encoding(text[start : start + stride], False)) - CUT_TOKENS
                if num_tokens >= limit:
                    raise ContextExceeded.of_prompt(num_tokens, limit, qualifier="more than ")
        encoding = self._encoding(text, add_special_tokens)
        if len(encoding) >= limit:
            raise ContextExceeded.of_prompt(len(encoding), limit)
        return list(encoding.ids)

    def check_chars(self, num_chars: int, limit: int, param: str = "prompt") -> None:
        """Raise ``ContextExceeded`` if a text of so many characters has more than ``limit`` tokens in any case."""
        most = limit * self._longest_token
        if num_chars > most:
            raise ContextExceeded(
                f"This model's maximum context length is {limit} tokens. However, your {param} has {num_chars} "
                f"characters, more than the {most} that it can hold. Please reduce the length of the input prompt.",
                param=param,
            )

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """Tokenize a text, by the call that lets other threads run meanwhile (``encode`` does not)."""
        try:
            return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError) as error:  # the Rust core takes a lone surrogate for "no string"
            raise RequestError(
                f"Got text that is not valid Unicode: {ascii(text[:80])[:80]}", param="prompt"
            ) from error

    def runs_of(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of words, for ``SamplingParams.bad_words_token_ids``: at the begin of a text, and inside.

        As in vLLM, a word inside a text is a run of its own only if its space makes another first token, not one more.
        A word that the tokenizer splits in another way within a longer one is not found.
        """
        runs: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = self.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            if bare:
                runs[tuple(bare)] = None
            if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
                runs[tuple(spaced)] = None
        return tuple(runs)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; unknown ids have none, and ids out of range raise ``RequestError``."""
        try:
            # Other threads run during ``decode_batch``, and not during ``decode``.
            text: str = self._fast.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= MAX_TOKEN_ID)
            raise RequestError(f"Got token id {wrong}, expected 0 to {self.vocab_size - 1}", param="tokens") from None
        return text

    def pieces(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TextPieces:
        """Return an incremental decoder of one answer, given the token ids before it."""
        if self._tables is not None:
            return BytePieces(prompt, self._tables[skip_special_tokens])
        decode = functools.partial(self._fast.decode, skip_special_tokens=skip_special_tokens)
        return DecodedPieces(prompt, decode)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),  # more variables: tools, enable_thinking ...
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,  # end with the text that opens the model's turn
        continue_final_message: bool = False,  # end inside the last message, which the model goes on with
    ) -> str:
        """Return the text of a chat, by the model's own template or a given one.

        ``RequestError`` if there is none, it refuses the messages, or a variable would replace one of the renderer's.
        """
        if template is None and self._hf.chat_template is None:
            raise RequestError("The model's tokenizer has no chat template", param="messages")
        if not messages:
            raise RequestError("Got no messages, expected at least one", param="messages")
        if refused := sorted(self._reserved.intersection(template_kwargs)):
            raise RequestError(f"Got {refused[0][:100]!r}, which a template cannot take", param="chat_template_kwargs")
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                **template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # A template is a program over the caller's messages: its errors are the caller's.
            reason = str(error)[:MAX_REASON_CHARS]
            raise RequestError(f"The chat template refused the messages: {reason}", param="messages") from error
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may end within a character."""
        return self._token_bytes(token_id)

    def token_name(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, its bytes in the vocabulary's own letters."""
        name: str | None = self._fast.id_to_token(token_id)
        return name

    @functools.cached_property
    def settings_json(self) -> bytes:
        """The settings of ``tokenizer_config.json`` as JSON, without paths of this machine."""
        given = {name: value for name, value in self._hf.init_kwargs.items() if name not in _PLACES}
        settings = {**given, "tokenizer_class": type(self._hf).__name__, "chat_template": self.chat_template}
        return json.dumps(settings, default=lambda token: getattr(token, "content", None)).encode()

    def token_text(self, token_id: int) -> str:
        """Return a token as text on its own, its leading space kept, U+FFFD for half a character."""
        return self._token_bytes(token_id).decode("utf-8", errors="replace")
