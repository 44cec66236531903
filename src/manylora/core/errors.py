"""The tree of errors that users or load can cause; bugs are assertions.

ManyloraError
├── ConfigError              wrong configuration; raised before anything starts
│   ├── CertificateRefused   one side of a TLS connection refuses the certificate of the other
│   └── ModelTooLarge        the base leaves no memory for pages on its devices
├── RequestError     4xx     wrong request; other requests are untouched
│   ├── ContextExceeded 400  the prompt does not fit into the model's context
│   └── ModelNotFound  404   the request names a model that is not served
├── AdapterError     4xx     wrong adapter; names the adapter and the reason
│   ├── AdapterNotFound  404 no such adapter, or no such path
│   ├── AdapterExists    400 the name is taken
│   ├── AdapterForbidden 403 the path lies outside the allowed roots
│   ├── AdapterReplaced  409 an answer began on a version that its next engine lacks
│   ├── AdapterUnavailable 503 its registry does not answer now
│   └── WeightsMissing   400 its file lacks weights of a module that it targets
├── CapacityError    429/503 no room now; says when to try again
│   ├── CallerLimit    429   the caller has as much as it may; others are not refused
│   └── NoPlace        503   no node of the cluster has room for an engine
├── SnapshotFailed   500     a read of an engine's state failed; the engine goes on
├── EngineDead       500     the engine process is gone, and no other took the request over
├── PoisonRequest    500     the request was at two deaths of engines; it is not tried again
└── Stalled                  requests are left but nothing is pending: a bug in a policy
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "AdapterError",
    "AdapterExists",
    "AdapterForbidden",
    "AdapterNotFound",
    "AdapterReplaced",
    "AdapterUnavailable",
    "CallerLimit",
    "CapacityError",
    "CertificateRefused",
    "ConfigError",
    "ContextExceeded",
    "EngineDead",
    "ManyloraError",
    "ModelNotFound",
    "ModelTooLarge",
    "NoPlace",
    "PoisonRequest",
    "RequestError",
    "SnapshotFailed",
    "Stalled",
    "WeightsMissing",
]


class ManyloraError(Exception):
    """Root of the tree; ``status`` is the HTTP status of the server's answer."""

    status: int = 500


class ConfigError(ManyloraError):
    """A configuration value is wrong; the message shows the value and what was expected."""

    status = 400


class CertificateRefused(ConfigError):
    """One side of a TLS connection refuses the certificate of the other, or its lack."""


class ModelTooLarge(ConfigError):
    """The base leaves no memory for pages on its devices; the message has the sizes."""


class RequestError(ManyloraError):
    """A request is wrong; ``param`` is the field at fault, ``None`` if it is no single field."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextExceeded(RequestError):
    """The prompt does not fit into the model's context; in vLLM's words, by which clients know it."""

    @classmethod
    def of_prompt(cls, num_tokens: int, limit: int, *, qualifier: str = "") -> Self:
        """Return the error of a prompt that leaves no token to answer."""
        return cls(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{qualifier}{num_tokens} input tokens, and one at least must be left to answer. Please reduce the length "
            "of the input prompt.",
            param="prompt",
        )

    @classmethod
    def of_answer(cls, num_tokens: int, max_tokens: int, limit: int) -> Self:
        """Return the error of a prompt that leaves fewer tokens to answer than were asked for."""
        return cls(
            f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens "
            f"and your prompt contains {num_tokens} input tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens.",
            param="max_tokens",
        )


class ModelNotFound(RequestError):
    """A request names a model (base or adapter) that is not served."""

    status = 404


class AdapterError(ManyloraError):
    """An adapter, by its name or path in the request, cannot be served.

    The reason is in words that let the owner of the adapter repair it.
    """

    status = 400

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"adapter {adapter!r}: {reason}")
        self.adapter = adapter
        self.reason = reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Return what another process makes it from."""
        return type(self), (self.adapter, self.reason)


class AdapterNotFound(AdapterError):
    """No adapter of that name is loaded, or the path does not exist."""

    status = 404


class AdapterExists(AdapterError):
    """The name is already taken by an adapter or by the base model."""


class WeightsMissing(AdapterError):
    """The weight file lacks the weights of a module that the settings target; those that it has are fine."""


class AdapterForbidden(AdapterError):
    """The path lies outside the directories adapters may be loaded from."""

    status = 403


class AdapterReplaced(AdapterError):
    """An answer that an engine began cannot go on: the next engine has other weights under that name, or none."""

    status = 409


class AdapterUnavailable(AdapterError):
    """The registry of an adapter does not answer now; the same may succeed later."""

    status = 503


class CapacityError(ManyloraError):
    """There is no room now; try again in ``retry_after_s``.

    ``every_s`` is the time from one place that becomes free to the next, 0 where no places are counted. The status is
    429 if the caller should slow down, 503 if the service is stopping or gone.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, every_s: float = 0.0, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.every_s = every_s
        self.status = status


class CallerLimit(CapacityError):
    """A caller has as much under way as it may, or took as much in a minute; others are not refused for that."""


class NoPlace(CapacityError):
    """No node of a cluster has room for an engine; says what the engine needs and what the nodes have."""

    def __init__(self, message: str, *, retry_after_s: float = 15.0, status: int = 503) -> None:
        super().__init__(message, retry_after_s=retry_after_s, status=status)


class SnapshotFailed(ManyloraError):
    """An engine's state could not be read, for a bug in a report; its requests are untouched."""


class EngineDead(ManyloraError):
    """The engine is gone; its requests in flight are lost, later ones may succeed."""


class PoisonRequest(ManyloraError):
    """A request ended because engines died on it again and again; see ``hosting.resumption``."""


class Stalled(ManyloraError):
    """Requests are left, the engine is idle and no event is pending: liveness is broken."""
