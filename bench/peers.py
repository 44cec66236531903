"""Tokens per second of the engine in one process, beside transformers' ``generate`` and PEFT's with an adapter per row.

    python bench/peers.py [MODEL] [--adapters DIR] [--num-prompts 32] [--input-len 128] [--output-len 64]

On any model and adapters, by default those of the demo; `throughput.py` compares on one model, whose result is kept.
The systems answer the same requests in turns, a round of each after the other; quote only the ratio.

Both peers take static batches: prompts are padded to the longest, and every row runs until the longest answer is
complete. Only the tokens that were asked for count.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from publishing import arguments, publish, table
from ratios import ratio_by_round
from transformers import AutoModelForCausalLM

from manylora.core.errors import ConfigError
from manylora.core.types import SamplingParams
from manylora.demo import demo_adapters, demo_model_path
from manylora.lab.bench.rounds import machine, time_in_turns
from manylora.serving.offline import Engine

PEER, PEER_MIXED = "transformers", "PEFT"
OURS, OURS_MIXED = "manylora, base", "manylora, adapters"


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


def draw_requests(num_requests: int, num_in: int, num_out: int, *, vocab_size: int, seed: int) -> list[PeerRequest]:
    """Return requests with random prompts."""
    prompts = np.random.default_rng(seed).integers(10, vocab_size, (num_requests, num_in))
    return [PeerRequest(prompt=tuple(prompt), num_out=num_out) for prompt in prompts.tolist()]


def make_systems(
    engine: Engine, model: Path, asked: Sequence[PeerRequest], adapters: Mapping[str, Path], device: str
) -> dict[str, Callable[[], object]]:
    """Return what each system does in a round; request *i* takes adapter *i*, modulo their number.

    Args:
        engine: Ours, with the adapters loaded and without a prefix cache: a second round would find its prompts.
        model: Folder of the base, for the others.
        asked: The requests.
        adapters: Folders by name.
        device: Device of the others.
    """
    names = list(adapters)
    mixed = [names[index % len(names)] for index in range(len(asked))]
    sampling = [SamplingParams(temperature=0.0, max_tokens=one.num_out, ignore_eos=True) for one in asked]

    def ours(who: Sequence[str] | None) -> None:
        answers = engine.generate([one.prompt for one in asked], adapter=who, sampling=sampling)
        assert all(answer.error is None for answer in answers)

    base, peft = Transformers(model, device=device), Peft(model, [adapters[name] for name in names], device=device)
    return {
        OURS: lambda: ours(None),
        OURS_MIXED: lambda: ours(mixed),
        PEER: lambda: base.run_all(asked),
        PEER_MIXED: lambda: peft.run_mixed(asked),
    }


def main() -> None:
    parser = arguments(__doc__, quick="two short requests, one round")
    parser.add_argument("model", nargs="?", type=Path, help="folder of the base")
    parser.add_argument("--adapters", type=Path, metavar="DIR", help="folder of adapters' folders")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="of all systems")
    options = parser.parse_args()
    num, num_in, num_out, rounds = options.num_prompts, options.input_len, options.output_len, options.rounds
    if options.quick:
        num, num_in, num_out, rounds = 2, 8, 4, 1
    model = options.model or demo_model_path()
    adapters = demo_adapters()
    if options.adapters is not None:
        adapters = {place.parent.name: place.parent for place in sorted(options.adapters.glob("*/adapter_config.json"))}
    elif options.model is not None:
        parser.error("Got a model without --adapters, expected a folder of its adapters")
    with Engine(str(model), adapters=adapters, prefix_caching=False, device=options.device) as engine:
        asked = draw_requests(num, num_in, num_out, vocab_size=engine.tokenizer.vocab_size, seed=0)
        seconds = time_in_turns(make_systems(engine, model, asked, adapters, options.device), rounds)
    ratios = {
        f"{ours} over {peer}": str(ratio_by_round(seconds[peer], seconds[ours]))
        for ours, peer in ((OURS, PEER), (OURS_MIXED, PEER_MIXED))
    }
    rows = [(name, f"{num * num_out / statistics.median(times):,.1f}") for name, times in seconds.items()]
    heads = (f"{num} requests of {num_in} tokens in and {num_out} out on {options.device}", "tokens/s")
    lines = [*table(heads, rows), "", *(f"{name}: {ratio}" for name, ratio in ratios.items())]
    publish("peers", {"machine": machine(), "seconds": seconds}, "\n".join(lines), is_kept=False)


if __name__ == "__main__":
    main()
