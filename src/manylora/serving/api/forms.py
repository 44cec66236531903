"""Forms of answers are checked before their requests go to an engine: in turns of callers, once for each tenant."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from starlette.requests import Request

from manylora.core.errors import RequestError
from manylora.core.types import Constraint
from manylora.execution.sampling.grammar import check_available
from manylora.serving.http.turns import FairWork
from manylora.serving.text.forms import FormProcess

__all__ = ["FormChecks"]

MAX_KNOWN = 8192  # forms whose result is remembered, by digest; a service has tens


class FormChecks:
    """Checks forms, and remembers the results. For the event loop's thread alone."""

    def __init__(self, process: FormProcess, turns: FairWork) -> None:
        self._process = process
        self._turns = turns
        self._known: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, request: Request, constraint: Constraint) -> None:
        """Return once the form of a request is known to be one that engines can follow.

        ``RequestError`` if it cannot be followed or costs too much; other errors are those of ``FairWork.run`` and
        ``FormProcess.check``.
        """
        told_apart_by = f"{constraint.tenant} {constraint.kind} {constraint.text}"  # no tenant's name has a space
        digest = hashlib.blake2b(told_apart_by.encode(), digest_size=16).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
        else:
            check_available(constraint)
            self._known[digest] = await self._turns.run(request, lambda: self._result(digest, constraint))
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if (refused := self._known[digest]) is not None:
            raise RequestError(refused)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _result(self, digest: bytes, constraint: Constraint) -> str | None:
        """Return the message of a form's refusal; on a thread, when it is the request's turn."""
        if digest in self._known:  # by a request that waited as well
            return self._known[digest]
        return self._process.check(constraint)
