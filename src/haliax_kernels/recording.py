# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""See the plans of the calls that a program makes: in the log, or collected while it is traced."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from haliax_kernels.plan import KernelPlan
from haliax_kernels.ring_plan import RingPlan

logger = logging.getLogger("haliax_kernels.plans")

_recorded: ContextVar[list[KernelPlan] | None] = ContextVar("recorded_plans", default=None)
_notes: ContextVar[tuple[str, ...]] = ContextVar("plan_notes", default=())
_ring: ContextVar[RingPlan | None] = ContextVar("plan_ring", default=None)
_logged: set[Hashable] = set()


@contextmanager
def recorded_plans() -> Iterator[list[KernelPlan]]:
    """Collect the plan of every call of a named kernel in the `with` block, refused ones too, in order.

    Under `jax.eval_shape` nothing runs: so one sees what a whole model would do on a mesh. What a program traces once
    and runs often, such as the body of a scan over layers, is there once; a function that is already compiled is not
    traced again, and is not there at all.
    """
    found: list[KernelPlan] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


@contextmanager
def plan_notes(*notes: str | None, ring: RingPlan | None = None) -> Iterator[None]:
    """Plans recorded or logged in the `with` block have these notes, too, and this ring."""
    token, ring_token = _notes.set(tuple(n for n in notes if n is not None)), _ring.set(ring)
    try:
        yield
    finally:
        _notes.reset(token)
        _ring.reset(ring_token)


def tell(key: Hashable, make: Callable[[], KernelPlan]) -> None:
    """Say that a call is made: to who records, and once per `key` and process to the log, at level INFO.

    Args:
        key: equal for calls with equal plans.
        make: makes the plan; called only where somebody wants it.
    """
    recorded, notes = _recorded.get(), _notes.get()
    log = logger.isEnabledFor(logging.INFO) and key not in _logged
    if recorded is None and not log:
        return
    plan = make()
    plan = replace(plan, notes=(*notes, *plan.notes), ring=_ring.get())
    if recorded is not None:
        recorded.append(plan)
    if log:
        _logged.add(key)
        logger.info("%s", plan)
