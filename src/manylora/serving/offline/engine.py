"""The engine as a Python object: a client of ``hosting`` with blocking calls.

An event loop on a background thread owns the fleet, which is one engine on another thread. So several threads can
generate at once and share batches, and adapters can be loaded meanwhile. An exception in the caller (also Ctrl-C)
cancels the requests of its call alone.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from manylora.core.adapters.report import check_folders
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.status import AdapterStatus, EngineStats
from manylora.core.errors import AdapterNotFound, ConfigError, EngineDead, ManyloraError
from manylora.core.generation import GenerationDefaults
from manylora.core.options import nearest
from manylora.core.types import Request, SamplingParams
from manylora.serving.hosting.engine.service import Builder, builder_for
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.hosting.fleet.snapshot import merge_snapshots
from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.links.link import LINKS
from manylora.serving.hosting.protocol import EngineSpec
from manylora.serving.offline.batch import Batch, Generation, Job
from manylora.serving.text import Tokenizer
from manylora.serving.text.model_files import load_generation_defaults

__all__ = ["Engine"]

Message = Mapping[str, Any]
Prompt: TypeAlias = str | tuple[int, ...]
Encode: TypeAlias = Callable[[Any], tuple[Prompt, tuple[int, ...]]]
"""Returns a prompt as it is reported, and its token ids."""

T = TypeVar("T")

CLOSED = "the engine was closed"


class Engine:
    """A base model and its adapters, in this process.

    ::

        with Engine("demo") as engine:
            for answer in engine.chat([[{"role": "user", "content": "hello"}]] * 2, adapter=["upper", None]):
                print(answer.adapter, answer.text)

    Safe to use from several threads. Close it, or use it as a context manager.

    Args:
        model: A Hugging Face checkpoint directory or hub name, or ``demo``: the small model in the package.
        adapters: PEFT adapter directories by name; ``None`` with ``demo`` for all demo adapters.
        step_log: File for one JSON line per step and per load, for ``manylora calibrate``.
        build: Builds the engine's parts; ``None`` for the builder of the configuration.
        options: Fields of ``ModelConfig``, ``MemoryConfig``, ``SchedulerConfig``, ``AdapterConfig``, and ``seed``,
            ``simulate`` and ``cache_dir`` of ``EngineConfig``, by name.

    Raises:
        ConfigError: An option is unknown or invalid, or the model cannot be served.
        AdapterError: An adapter cannot be served, as its configuration and the header of its weights show. Weights are
            read when they are needed, and a fault in them fails the generations that need them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        step_log: str | Path | None = None,
        build: Builder | None = None,
        **options: Any,
    ) -> None:
        if model == "demo":
            from manylora.demo import demo_adapters, demo_model_path

            model = demo_model_path()
            adapters = demo_adapters() if adapters is None else adapters
            options.setdefault("served_model_name", "demo")
        config = _engine_config(str(model), options)
        config = dataclasses.replace(config, step_log=None if step_log is None else str(step_log))
        paths = {name: str(path) for name, path in (adapters or {}).items()}
        if build is None and config.simulate is None:  # before the model is loaded, which may take minutes
            check_folders(paths, max_bytes=config.adapters.max_adapter_bytes)
        self.tokenizer = Tokenizer.load(config.model.tokenizer or config.model.model, revision=config.model.revision)
        self._defaults = load_generation_defaults(config.model) or GenerationDefaults()
        self._window = min(2 * config.scheduler.max_num_seqs, config.scheduler.max_waiting)
        self._ids = itertools.count()  # next() on it is atomic
        self._is_closed = False
        served_name = self._served_name = config.model.served_model_name or config.model.model
        spec = EngineSpec(
            config=config, served_name=served_name, builder=build or builder_for(config), is_observed=False
        )
        self._fleet = Fleet(
            [partial(LINKS["thread"], spec, BaseShare())], served_name=served_name, observe=lambda observed: None
        )
        self._event_loop = asyncio.new_event_loop()
        # A daemon, so that a program that does not close the engine still ends.
        self._thread = threading.Thread(target=self._event_loop.run_forever, name="manylora-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch must not outlive the interpreter
        try:
            modules = [LoraModule(name, path) for name, path in paths.items()]
            self._call(self._fleet.start(modules))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        adapter: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Continue prompts, batched together over all adapters.

        A prompt that cannot be served (too long, or its adapter cannot be read) fails alone, with the reason in its
        ``Generation.error``.

        Args:
            prompts: Texts or token ids; one prompt or several.
            adapter: One adapter for all prompts, or one per prompt; ``None`` is the base.
            sampling: One for all prompts, or one per prompt; ``None`` for the base model's ``generation_config.json``.
            progress: Show a progress bar on the terminal.

        Returns:
            One generation per prompt, in their order.

        Raises:
            AdapterNotFound: An adapter is not loaded; no prompt was run.
            ValueError: The number of adapters or samplings is not that of prompts.
            EngineDead: The engine failed or was closed.
        """
        given = _as_prompts(prompts)
        return self._generate(given, self._encode, adapter, sampling, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        adapter: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **template_kwargs: Any,
    ) -> list[Generation]:
        """Answer conversations by the model's chat template; other arguments and errors are as for ``generate``.

        A conversation lists ``{"role": ..., "content": ...}``; ``template_kwargs`` are variables for the template.
        """
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        given: Sequence[Any] = [conversations] if is_one else conversations
        return self._generate(
            given, partial(self._render, template_kwargs=template_kwargs), adapter, sampling, progress
        )

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> AdapterStatus:
        """Load a PEFT adapter from a directory, or raise ``AdapterError``; generation goes on meanwhile.

        With ``replace`` the name may exist: earlier requests finish on the old version.
        """
        return self._call(self._fleet.adapters.load(name, str(path), replace_existing=replace))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, or raise ``AdapterNotFound``; its requests finish first."""
        self._call(self._fleet.adapters.unload(name))

    def pin_adapter(self, name: str, pinned: bool = True) -> AdapterStatus:
        """Pin an adapter on the device, or unpin it; raise ``CapacityError`` if there is no room to pin it."""
        return self._call(self._fleet.adapters.pin(name, pinned))

    def warm_adapter(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device, or raise ``CapacityError`` if there is no room."""
        return self._call(self._fleet.adapters.warm(name))

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """Return the state of every adapter, by name."""
        _, statuses = merge_snapshots(self._call(self._fleet.engines.snapshots()).values())
        return tuple(sorted(statuses, key=lambda status: status.name))

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters."""
        stats, _ = merge_snapshots(self._call(self._fleet.engines.snapshots(0)).values())
        return stats

    def close(self) -> None:
        """Stop the engine and free its memory; requests in flight raise ``EngineDead``."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._fleet.stop(EngineDead(CLOSED)), self._event_loop).result()
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
        self._thread.join()
        self._event_loop.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the engine."""
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop's thread and wait for it; an interrupted wait cancels it."""
        if self._is_closed:
            work.close()
            raise EngineDead(CLOSED)
        call = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        try:
            return call.result()
        except BaseException:
            call.cancel()
            raise

    def _encode(self, prompt: Prompt) -> tuple[Prompt, tuple[int, ...]]:
        return prompt, tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt

    def _render(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        text = self.tokenizer.render_chat(messages, template_kwargs)
        return text, tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _generate(
        self,
        given: Sequence[Any],
        encode: Encode,
        adapter: str | Sequence[str | None] | None,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[Generation]:
        """Run prompts or conversations."""
        adapters = _one_each("adapters", adapter, len(given), str | None)
        samplings = _one_each("samplings", sampling or self._defaults.sampling(), len(given), SamplingParams)
        if self._is_closed:
            raise EngineDead(CLOSED)
        self._check_names(adapters)
        most = None if sampling else self._defaults.max_new_tokens
        answers = [self._prepare(*asked, encode, most) for asked in zip(given, adapters, samplings, strict=True)]
        jobs = [answer for answer in answers if isinstance(answer, Job)]
        with _progress(len(given), progress) as advance:
            advance(len(given) - len(jobs))
            self._call(
                Batch(requests=self._fleet.requests, waiting=deque(jobs), window=self._window, on_ended=advance).run()
            )
        return [answer.generation() if isinstance(answer, Job) else answer for answer in answers]

    def _check_names(self, adapters: Sequence[str | None]) -> None:
        """Refuse a call with an adapter that is not loaded."""
        loaded = self._fleet.adapters.loaded
        for name in dict.fromkeys(adapters):
            is_known = name is None or name == self._served_name or name.removeprefix(f"{self._served_name}:") in loaded
            if not is_known:
                raise AdapterNotFound(
                    str(name), f"it is not loaded; {len(loaded)} are: {', '.join(sorted(loaded)[:5])}"
                )

    def _prepare(
        self,
        asked: Any,
        adapter: str | None,
        sampling: SamplingParams,
        encode: Encode,
        default_max_tokens: int | None,
    ) -> Job | Generation:
        """Return the job of a prompt, or a failed generation if the prompt is invalid."""
        shown: Prompt = asked if isinstance(asked, str | tuple) else ""
        try:
            if sampling.constraint is not None:
                from manylora.execution.sampling.grammar import check_constraint

                check_constraint(sampling.constraint)
            shown, tokens = encode(asked)
        except ManyloraError as error:
            return Generation(
                prompt=shown, text="", token_ids=(), finish_reason="error", adapter=adapter, error=str(error)
            )
        request = Request(
            request_id=f"offline-{next(self._ids)}",
            prompt=tokens,
            sampling=sampling,
            model=adapter or "",
            default_max_tokens=default_max_tokens,
        )
        return Job(shown, adapter, request, self.tokenizer)


def _engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of flat options; field names are unique over its parts."""
    left = dict(options)
    known = ["adapters", "step_log", "build", "seed", "simulate", "cache_dir"]

    def pick(part: type[Any]) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(part)]
        known.extend(names)
        return {name: left.pop(name) for name in names if name in left}

    made = EngineConfig(
        model=ModelConfig(model=model, **pick(ModelConfig)),
        memory=MemoryConfig(**pick(MemoryConfig)),
        scheduler=SchedulerConfig(**pick(SchedulerConfig)),
        adapters=AdapterConfig(**pick(AdapterConfig)),
        seed=left.pop("seed", 0),
        simulate=left.pop("simulate", None),
        cache_dir=left.pop("cache_dir", None),
    )
    if left:
        raise ConfigError(f"Got unknown option {(name := next(iter(left)))!r}, {nearest(name, known)}")
    return made


def _as_prompts(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [tuple(prompts)]  # type: ignore[arg-type]
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]  # type: ignore[arg-type]


def _one_each(name: str, given: Any, num_prompts: int, kind: Any) -> list[Any]:
    """Return one value for each prompt, from a single value or a sequence."""
    each = [given] * num_prompts if isinstance(given, kind) else list(given)
    if len(each) != num_prompts:
        raise ValueError(f"Got {len(each)} {name} for {num_prompts} prompts")
    return each


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of jobs that have ended."""
    if not is_shown:
        yield lambda num_done: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("generating", total=total)
        yield lambda num_done: bar.advance(task, num_done)
