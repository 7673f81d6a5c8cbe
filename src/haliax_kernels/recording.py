# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""See the plans of the calls that a program makes: in the log, or collected while it is traced."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

import jax

from haliax_kernels.plan import KernelPlan
from haliax_kernels.ring_plan import RingPlan

T = TypeVar("T")

logger = logging.getLogger("haliax_kernels.plans")

_recorded: ContextVar[list["RecordedCall"] | None] = ContextVar("recorded_calls", default=None)
_notes: ContextVar[tuple[str, ...]] = ContextVar("plan_notes", default=())
_ring: ContextVar[RingPlan | None] = ContextVar("plan_ring", default=None)
_said: ContextVar[list[str] | None] = ContextVar("implementation_notes", default=None)
_logged: set[Hashable] = set()


@dataclass(frozen=True)
class RecordedCall:
    """One call of a named kernel.

    Attributes:
        plan: its plan.
        run: what runs it, from its global arrays in the plan's order to a tuple of outputs; None where it is refused.
    """

    plan: KernelPlan
    run: Callable[..., tuple[jax.Array, ...]] | None

    @property
    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays that `run` takes."""
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.plan.inputs)


@contextmanager
def _collecting(variable: ContextVar[list[T] | None]) -> Iterator[list[T]]:
    found: list[T] = []
    token = variable.set(found)
    try:
        yield found
    finally:
        variable.reset(token)


def recorded_calls() -> AbstractContextManager[list[RecordedCall]]:
    """Collect every call of a named kernel in the `with` block, refused ones too, in order.

    Under `jax.eval_shape` nothing runs: so one sees what a whole model would do on a mesh. What a program traces once
    and runs often, such as the body of a scan over layers, is there once; a function that is already compiled is not
    traced again, and is not there at all.
    """
    return _collecting(_recorded)


@contextmanager
def plan_notes(*notes: str | None, ring: RingPlan | None = None) -> Iterator[None]:
    """Plans recorded or logged in the `with` block have these notes, too, and this ring."""
    token, ring_token = _notes.set(tuple(n for n in notes if n is not None)), _ring.set(ring)
    try:
        yield
    finally:
        _notes.reset(token)
        _ring.reset(ring_token)


def implementation_notes() -> AbstractContextManager[list[str]]:
    """Collect what implementations say of themselves while they are traced in the `with` block, each thing once."""
    return _collecting(_said)


def say(note: str) -> None:
    """Say of an implementation that is being traced what belongs in the plan of its call, such as its block sizes."""
    found = _said.get()
    if found is not None and note not in found:
        found.append(note)


def tell(
    key: Hashable, make: Callable[[], KernelPlan], run: Callable[..., tuple[jax.Array, ...]] | None = None
) -> None:
    """Say that a call is made: to who records, and once per `key` and process to the log, at level INFO.

    Args:
        key: equal for calls with equal plans.
        make: makes the plan; called only where somebody wants it.
        run: what runs the call.
    """
    recorded, notes = _recorded.get(), _notes.get()
    log = logger.isEnabledFor(logging.INFO) and key not in _logged
    if recorded is None and not log:
        return
    plan = make()
    plan = replace(plan, notes=(*notes, *plan.notes), ring=_ring.get())
    if recorded is not None:
        recorded.append(RecordedCall(plan, run))
    if log:
        _logged.add(key)
        logger.info("%s", plan)
