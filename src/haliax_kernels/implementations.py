# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The choice among several implementations of one operation."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from haliax_kernels import _compat
from haliax_kernels.errors import ArgumentError, NoImplementationError, UnsupportedOptionError

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What a call asks for, as far as the choice depends on it."""

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        ...

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options in use that not every implementation has to honour."""
        ...


L = TypeVar("L")
R = TypeVar("R", bound=Request)


@dataclass(frozen=True)
class Implementation(Generic[L, R]):
    """One implementation of an operation.

    Attributes:
        name: what `implementation=` calls it.
        platforms: where it runs; None for everywhere.
        honours: the options it honours.
        make: the local function of a layout, which is what the signature of a call depends on; it imports what it
            needs.
        limits: further reasons why it cannot run a request.
    """

    name: str
    platforms: frozenset[str] | None
    honours: frozenset[str]
    make: Callable[[L], Callable[..., Any]] = field(compare=False)
    limits: Callable[[R], list[str]] = field(default=lambda request: [], compare=False)

    def refusals(self, request: R) -> list[str]:
        """Why it cannot run the request; empty if it can."""
        reasons = [f"it does not support {o}" for o in request.options if o not in self.honours]
        reasons += self.limits(request)
        if self.platforms is not None and request.platform not in self.platforms:
            reasons.insert(
                0, f"it needs a {' or '.join(sorted(self.platforms))}, and this call runs on {request.platform}"
            )
        return reasons


def choose(
    operation: str, implementations: Sequence[Implementation[L, R]], request: R, forced: str | None
) -> Implementation[L, R]:
    """The implementation for a request: the forced one, or the first that honours everything.

    Args:
        operation: its name in messages.
        implementations: the better one first.
        request: what the call asks for.
        forced: the caller's `implementation=`.

    Raises:
        ArgumentError: an unknown name.
        UnsupportedOptionError: the forced one cannot honour the request; the message names the option.
        NoImplementationError: none can; holds every reason.
    """
    if forced is not None:
        found = next((i for i in implementations if i.name == forced), None)
        if found is None:
            raise ArgumentError(
                f"{operation}: implementation={forced!r} is none of "
                f"{', '.join(repr(i.name) for i in implementations)}, or None for the best on the platform."
            )
        reasons = found.refusals(request)
        if reasons:
            raise UnsupportedOptionError(
                _reason(operation, found, reasons) + " Leave implementation= out for an automatic choice."
            )
        return found
    refused: list[Exception] = []
    made_for_it: list[Exception] = []
    for candidate in implementations:
        reasons = candidate.refusals(request)
        if not reasons:
            if made_for_it:
                _log_once(f"{made_for_it[0]} Taking {candidate.name!r} instead.")
            return candidate
        refused.append(UnsupportedOptionError(_reason(operation, candidate, reasons)))
        if request.platform in (candidate.platforms or ()):
            made_for_it.append(refused[-1])
    options = ", ".join(request.options)
    raise NoImplementationError(f"{operation}: no implementation supports {options} here", refused)


def _reason(operation: str, implementation: Implementation[L, R], reasons: list[str]) -> str:
    return f"{operation}: implementation {implementation.name!r} cannot run this call: {'; '.join(reasons)}."


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)


def dtype_limits(dtype: Any, *taken: Any) -> list[str]:
    """Why an implementation that takes these dtypes cannot run a request in `dtype`; empty if it can."""
    if dtype in taken:
        return []
    *names, last = (str(jnp.dtype(t)) for t in taken)
    return [f"it takes {', '.join(names)} and {last}, not {jnp.dtype(dtype)}"]


_planned: ContextVar[tuple[str | None, str]] = ContextVar("planned_platform", default=(None, ""))


@contextmanager
def planned_platform(platform: str | None, kind: str = "") -> Iterator[None]:
    """Choose as on another platform (`cpu`, `gpu` or `tpu`) in the `with` block, to plan or compile for it.

    Args:
        platform: the platform; None for the real one.
        kind: the `device_kind` of its devices, as JAX calls it; empty for any.
    """
    token = _planned.set((platform, kind))
    try:
        yield
    finally:
        _planned.reset(token)


def current_device_kind() -> str:
    """The `device_kind` of the devices that a call here runs on; empty where only the platform is planned."""
    platform, kind = _planned.get()
    return jax.devices()[0].device_kind if platform is None else kind


def current_platform() -> str:
    """The platform that a call in this context runs on: the planned one, else that of the context's mesh, else JAX's
    default backend."""
    mesh = _compat.context_mesh() or _compat.legacy_mesh()
    return _planned.get()[0] or _compat.mesh_platform(mesh) or jax.default_backend()
