"""The engine as a Python object.

The same core and loop as the server's, on a background thread. So several threads may generate at once and share
batches, adapters can be loaded while others answer, and an exception in the caller (Ctrl-C too) leaves the engine
as it was: its requests are cancelled, the rest goes on.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any, Self

from manylora.clock import Clock, WallClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.costs.step_log import LoggedExecutor, open_step_log
from manylora.engine.core import EngineCore
from manylora.engine.status import AdapterStatus, EngineStats
from manylora.errors import CapacityError, ConfigError, EngineDead, ManyloraError, ModelNotFound
from manylora.offline.engine_thread import EngineThread, Inbox
from manylora.offline.generation import Generation, Job
from manylora.ports import EngineParts
from manylora.text import Detokenizer, Tokenizer
from manylora.types import Request, SamplingParams

__all__ = ["Engine"]

BuildParts = Callable[[EngineConfig, Clock], EngineParts]
Message = Mapping[str, Any]

RETRY_S = 0.05
"""How long to wait before requests that found the queue full (other threads fill it too) are offered again."""


class Engine:
    """A base model and its adapters, in this process.

    ::

        with Engine("demo") as engine:
            for answer in engine.chat([[{"role": "user", "content": "hello"}]] * 2, adapter=["upper", None]):
                print(answer.adapter, answer.text)

    Safe to use from several threads. Close it, or use it as a context manager.

    Args:
        model: A Hugging Face checkpoint directory (or hub name where a network is at hand), or ``demo``: the small
            model that comes with the package.
        adapters: PEFT adapter directories by name; of ``demo``, all its own when ``None``.
        step_log: File that gets one JSON line per step and per load, for ``manylora calibrate``.
        build: Builds the engine's parts; the torch executor when ``None`` (tests give the simulated one).
        options: Fields of ``ModelConfig``, ``MemoryConfig``, ``SchedulerConfig``, ``AdapterConfig`` and ``seed`` of
            ``EngineConfig``, by name.

    Raises:
        ConfigError: An option is unknown or wrong, or the model cannot be served.
        AdapterError: An adapter cannot be served.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        step_log: str | Path | None = None,
        build: BuildParts | None = None,
        **options: Any,
    ) -> None:
        if model == "demo":
            from manylora.demo import demo_adapters, demo_model_path

            model = demo_model_path()
            adapters = demo_adapters() if adapters is None else adapters
            options.setdefault("served_model_name", "demo")
        config = _engine_config(str(model), options)
        self._tokenizer = Tokenizer.load(config.model.tokenizer or config.model.model, revision=config.model.revision)
        build = build or _build_live_parts
        clock = WallClock()
        parts = self._parts = build(config, clock)
        self._files = ExitStack()
        executor = parts.executor
        if step_log is not None:
            log = self._files.enter_context(open_step_log(step_log, parts, config.model))
            executor = LoggedExecutor(executor, log)
        core = EngineCore.from_parts(
            parts, config, served_name=config.model.served_model_name or config.model.model, executor=executor
        )
        self._window = min(2 * config.scheduler.max_num_seqs, config.scheduler.max_waiting)
        self._ids = itertools.count()  # next() on it is atomic
        self._is_closed = False
        self._thread = EngineThread(core, clock)
        atexit.register(self.close)  # a thread inside torch must not outlive the interpreter
        try:
            for name, path in (adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        adapter: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Generation]:
        """Continue prompts, batched together whatever their adapters.

        A request that cannot be served (unknown adapter, too long) fails alone: its ``Generation.error`` says why.

        Args:
            prompts: Texts or token ids; one prompt or several.
            adapter: Who answers: one for all, or one per prompt; ``None`` is the base.
            sampling: One for all, or one per prompt; the defaults when ``None``.
            progress: Show a progress bar on the terminal.

        Returns:
            One generation per prompt, in their order.

        Raises:
            ValueError: There are not as many adapters or samplings as prompts.
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
        """Answer conversations, by the model's chat template; otherwise as ``generate``.

        Args:
            conversations: Lists of ``{"role": ..., "content": ...}``; one conversation or several.
            adapter: As in ``generate``.
            sampling: As in ``generate``.
            progress: As in ``generate``.
            template_kwargs: More variables for the template.
        """
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        given: Sequence[Any] = [conversations] if is_one else conversations
        return self._generate(given, partial(self._render, **template_kwargs), adapter, sampling, progress)

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> AdapterStatus:
        """Load a PEFT adapter; files are read on this thread while others generate.

        Args:
            name: What requests call it.
            path: Its directory.
            replace: Whether the name may be taken: requests that arrived before stay on the version they had.

        Raises:
            AdapterError: It cannot be served; says why.
            EngineDead: The engine failed or was closed.
        """
        self._thread.check_alive()
        version = self._parts.reader.read(name, str(path))
        return self._thread.call(lambda core, now: core.adapters.register(name, version, now, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests on it finish first.

        Raises:
            AdapterNotFound: There is none of that name.
        """
        self._thread.call(lambda core, now: core.adapters.unregister(name, now))

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """Return the state of every adapter, by name."""
        return self._thread.call(lambda core, now: core.adapters.statuses(now))

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters."""
        return self._thread.call(lambda core, now: core.stats())

    def close(self) -> None:
        """Stop the engine and give its memory back; what is in flight ends with ``EngineDead``."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.close()
        self._parts.close()
        self._files.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    def _encode(self, prompt: str | tuple[int, ...]) -> tuple[str | tuple[int, ...], tuple[int, ...]]:
        return prompt, tuple(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt

    def _render(self, messages: Sequence[Message], **template_kwargs: Any) -> tuple[str, tuple[int, ...]]:
        text = self._tokenizer.render_chat(messages, **template_kwargs)
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _generate(
        self,
        given: Sequence[Any],
        encode: Callable[[Any], tuple[str | tuple[int, ...], tuple[int, ...]]],
        adapter: str | Sequence[str | None] | None,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[Generation]:
        """Run prompts or chats: at most a window of them in the engine at a time, the rest waits here.

        Args:
            given: What was asked.
            encode: Makes of each what its generation shows as the prompt, and its token ids.
            adapter: As in ``generate``.
            sampling: As in ``generate``.
            progress: As in ``generate``.
        """
        adapters = _one_each("adapters", adapter, len(given), str | None)
        samplings = _one_each("samplings", sampling or SamplingParams(), len(given), SamplingParams)
        self._thread.check_alive()
        answers = [self._prepare(*asked, encode=encode) for asked in zip(given, adapters, samplings, strict=True)]
        jobs = deque(answer for answer in answers if isinstance(answer, Job))
        with _progress(len(given), progress) as advance:
            advance(len(given) - len(jobs))
            self._run(jobs, advance)
        return [answer.generation() if isinstance(answer, Job) else answer for answer in answers]

    def _prepare(
        self,
        asked: Any,
        adapter: str | None,
        sampling: SamplingParams,
        *,
        encode: Callable[[Any], tuple[str | tuple[int, ...], tuple[int, ...]]],
    ) -> Job | Generation:
        """Return the job for a prompt, or the failed generation when there can be none."""
        shown: str | tuple[int, ...] = asked if isinstance(asked, str | tuple) else ""
        try:
            if adapter == "":
                raise ModelNotFound("Got an adapter without a name, expected a name or None for the base")
            if sampling.json_schema is not None:
                from manylora.execution.sampling.grammar import check_schema

                check_schema(sampling.json_schema)
            shown, tokens = encode(asked)
        except ManyloraError as error:
            return Generation(
                prompt=shown, text="", token_ids=(), finish_reason="error", adapter=adapter, error=str(error)
            )
        request = Request(
            request_id=f"offline-{next(self._ids)}", prompt=tokens, sampling=sampling, model=adapter or ""
        )
        return Job(shown, adapter, request, Detokenizer(self._tokenizer, tokens, sampling))

    def _run(self, waiting: deque[Job], advance: Callable[[int], None]) -> None:
        """Bring every job to its end; on an exception, cancel those that are not there."""
        inbox = Inbox()
        running: dict[str, Job] = {}
        try:
            while waiting or running:
                is_full, num_failed = self._submit(waiting, running, inbox)
                num_ended = self._take(running, inbox, RETRY_S if is_full else None) if running or is_full else 0
                advance(num_failed + num_ended)
        finally:
            self._thread.cancel(list(running))

    def _submit(self, waiting: deque[Job], running: dict[str, Job], inbox: Inbox) -> tuple[bool, int]:
        """Move jobs from ``waiting`` to ``running``.

        Returns:
            Whether the engine's queue is full, and how many jobs it refused for good.
        """
        num_new = min(len(waiting), self._window - len(running))
        if num_new == 0:
            return False, 0
        chosen = {job.request.request_id: job for job in (waiting.popleft() for _ in range(num_new))}
        running.update(chosen)  # before they are in the engine: an exception from here on cancels them
        errors = self._thread.submit([job.request for job in chosen.values()], inbox)
        is_full, num_failed = False, 0
        for (request_id, job), error in reversed(list(zip(chosen.items(), errors, strict=True))):
            if error is None:
                continue
            del running[request_id]
            if isinstance(error, CapacityError):
                is_full = True
                waiting.appendleft(job)
            else:
                num_failed += 1
                job.fail(str(error))
        return is_full, num_failed

    def _take(self, running: dict[str, Job], inbox: Inbox, timeout_s: float | None) -> int:
        """Wait for outputs and take them; return how many jobs ended."""
        try:
            outputs = inbox.get(timeout=timeout_s)
        except Empty:
            return 0
        if isinstance(outputs, EngineDead):
            raise outputs
        num_before = len(running)
        stopped: list[str] = []
        for output in outputs:
            job = running.get(output.request_id)
            if job is None:
                continue  # more of an answer that a stop string ended
            job.take(output)
            if job.finish_reason is not None:
                del running[output.request_id]
                if output.finish is None:
                    stopped.append(output.request_id)  # by a stop string, of which the engine knows nothing
        self._thread.cancel(stopped)
        return num_before - len(running)


def _build_live_parts(config: EngineConfig, clock: Clock) -> EngineParts:
    from manylora.execution.build import build_parts
    from manylora.execution.sampling.sampler import make_sampler

    return build_parts(config, clock, make_sampler=partial(make_sampler, config.model))


def _engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Sort flat options into the parts of an ``EngineConfig``; no two parts share a field's name."""
    left = dict(options)

    def pick(part: type[Any]) -> dict[str, Any]:
        return {f.name: left.pop(f.name) for f in dataclasses.fields(part) if f.name in left}

    made = EngineConfig(
        model=ModelConfig(model=model, **pick(ModelConfig)),
        memory=MemoryConfig(**pick(MemoryConfig)),
        scheduler=SchedulerConfig(**pick(SchedulerConfig)),
        adapters=AdapterConfig(**pick(AdapterConfig)),
        seed=left.pop("seed", 0),
    )
    if left:
        raise ConfigError(f"Got unknown option {next(iter(left))!r}, expected a field of EngineConfig or its parts")
    return made


def _as_prompts(
    prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
) -> list[str | tuple[int, ...]]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [tuple(prompts)]  # type: ignore[arg-type]
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]  # type: ignore[arg-type]


def _one_each(what: str, given: Any, num_prompts: int, kind: Any) -> list[Any]:
    """Spread one value over all prompts, or check that there are as many as prompts."""
    each = [given] * num_prompts if isinstance(given, kind) else list(given)
    if len(each) != num_prompts:
        raise ValueError(f"Got {len(each)} {what} for {num_prompts} prompts")
    return each


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield what is told how many more jobs are done."""
    if not is_shown:
        yield lambda num_done: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("generating", total=total)
        yield lambda num_done: bar.advance(task, num_done)
