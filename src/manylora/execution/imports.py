"""Transformers' model classes, imported without what it has for training and compilation.

Beside a model class transformers imports ``torch.distributed.tensor`` and FSDP, which bring sympy; ``torch._dynamo``,
for decorators that a compiler reads; and, where they are installed, accelerate and scipy. That is over a third of what
an engine's imports take in time and memory, for parts that no process here uses: models are divided by ``share``, and
steps are captured rather than compiled (docs/operating.md, start-up time).

Transformers remembers what it did not find. So this is for processes that do nothing but serve, not for a program that
has an engine of its own in it, which may train a model as well.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

__all__ = ["import_model_classes"]

UNUSED = ("PIL", "accelerate", "scipy")
"""Packages that transformers imports where they are installed."""

COMPILER = "torch._dynamo"
TRACED = "torch._dynamo._trace_wrapped_higher_order_op"

logger = logging.getLogger(__name__)


def import_model_classes() -> None:
    """Import ``transformers.modeling_utils`` alone of what it would bring; all else can be imported afterwards.

    With releases of transformers that need more of it, the import is the usual one.
    """
    if "transformers" in sys.modules:
        return
    try:
        with _without_training():
            import_module("transformers.modeling_utils")
            import_module("transformers.masking_utils")  # with older releases the former does not import it
    except (ImportError, AttributeError, NameError) as error:
        logger.warning("whole_transformers_imported reason=%r", str(error))
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


@contextmanager
def _without_training() -> Iterator[None]:
    """Let transformers find a torch that is not distributed, and a compiler whose decorators do nothing."""
    import torch.distributed

    stand_ins: dict[str, ModuleType | None] = dict.fromkeys(UNUSED)  # ``None``: as if it were not installed
    if COMPILER not in sys.modules:
        stand_ins[COMPILER], stand_ins[TRACED] = _compiler(), ModuleType(TRACED)
        vars(stand_ins[TRACED])["TransformGetItemToIndex"] = _index_transform
    stand_ins = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(stand_ins)  # type: ignore[arg-type]
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        for name in stand_ins:
            del sys.modules[name]
        vars(torch).pop("_dynamo", None)  # set by imports of it; imported again where it is asked for


def _compiler() -> ModuleType:
    module = ModuleType(COMPILER)
    module.__path__ = []  # a package
    vars(module).update(allow_in_graph=_as_it_is, assume_constant_result=_as_it_is, disable=_as_it_is)
    return module


def _as_it_is(function: Callable[..., object] | None = None, *_: object, **__: object) -> object:
    """Return a function, or a decorator, that is not marked for a compiler."""
    return _as_it_is if function is None else function


def _index_transform() -> object:
    """Return the compiler's context for masks that are traced, which needs the compiler."""
    return import_module(TRACED).TransformGetItemToIndex()
