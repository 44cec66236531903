"""What the server's tests share: a tiny tokenizer on disk, an engine that makes tokens up, and servers around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bad_adapters import tiny_base
from reciter import reciter_parts
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.errors import AdapterError
from manylora.core.ports import EngineParts, check_each
from manylora.core.types import AdapterVersion, Output, Request
from manylora.serving.hosting.links.in_flight import OutputStream

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


PATIENCE_S = 60.0
"""How long to wait for what is sure to come: only a failure takes so long, on whatever machine."""


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Wait on an event loop until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.01)


async def texts(stream: OutputStream, requests: Sequence[Request]) -> list[str]:
    """Read a stream of a fleet to the end of these requests; return their answers, a character for each token."""
    found = {request.request_id: "" for request in requests}
    left = set(found)

    def consume(outputs: list[Output]) -> None:
        for output in outputs:
            found[output.request_id] += "".join(chr(token.token_id) for token in output.tokens)
            if output.finish is not None:
                left.remove(output.request_id)
        if not left:
            stream.close()

    await asyncio.wait_for(stream.deliver(consume), PATIENCE_S)
    return list(found.values())


class Gate:
    """Holds answers of ``reciter.held_parts`` at their first token until it is opened; works across processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def open(self) -> None:
        """Let every answer go on to its end, as quickly as it can."""
        self.path.unlink(missing_ok=True)


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> Path:
    """Write a tokenizer whose tokens are the 256 bytes, by value, and one end of sequence.

    It is that of a Llama, if no model is there yet: processes load it without torch, in a third of the time.
    """
    fast = FastTokenizer(models.BPE({char: byte for byte, char in enumerate(_byte_characters())}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    hf = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    hf.chat_template = template
    hf.save_pretrained(str(directory))
    if not (config := directory / "config.json").exists():
        config.write_text('{"model_type": "llama"}')
    return directory


class PackingReader:
    """Reads real adapters of the tiny base, as the torch executor does."""

    def read(self, name: str, path: str) -> AdapterVersion:
        return read_adapter(name, path, ReadRules(base=tiny_base(), max_bytes=1 << 26)).version

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        return check_each(self.read, adapters)


def packing_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    """Build an engine that recites, and that takes none but real adapters of the tiny base."""
    return replace(reciter_parts(config, clock), reader=PackingReader())
