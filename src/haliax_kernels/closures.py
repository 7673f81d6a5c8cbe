# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Find traced arrays that a kernel closed over: they belong to one trace and one sharding, and must be arguments."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from haliax_kernels._compat import Tracer
from haliax_kernels.errors import TransformError


def refuse_closed_over_tracers(fn: Callable[..., Any], kernel: str) -> None:
    """Raise where `fn` holds a tracer in its closure, its defaults, its fields, or a partial's arguments.

    Raises:
        TransformError: naming the variable.
    """
    for name, value in _held(fn):
        if any(isinstance(leaf, Tracer) for leaf in jax.tree_util.tree_leaves(value)):
            raise TransformError(
                f"kernel {kernel!r} closes over {name!r}, an array of the surrounding jit, grad or vmap: how it is "
                "sharded cannot be seen, and its gradient would be lost.\n"
                f"  - make it an argument:    give {name!r} a place in the signature and pass it in the call"
            )


def _held(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        yield from ((f"argument {i} of the partial", v) for i, v in enumerate(fn.args))
        yield from fn.keywords.items()
        yield from _held(fn.func)
    elif inspect.isfunction(fn):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
        yield from ((f"default {i}", v) for i, v in enumerate(fn.__defaults__ or ()))
    elif inspect.ismethod(fn):
        yield "self", fn.__self__
        yield from _held(fn.__func__)
    elif hasattr(fn, "__wrapped__"):
        yield from _held(fn.__wrapped__)
    else:
        yield "a field of it", fn  # a callable module, such as an eqx.Module
