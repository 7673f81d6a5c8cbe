# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Pallas' TPU interpret mode, with and without race detection. The one place that reaches into JAX's own modules."""

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from haliax_kernels.errors import UnsupportedOptionError

_MARK = "RACE DETECTED"


@contextlib.contextmanager
def tpu_interpret_mode(detect_races: bool = False) -> Iterator[None]:
    """Run every Pallas call in TPU interpret mode. What a failed run left in its simulated memory is dropped."""
    pltpu.reset_tpu_interpret_mode_state()
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=detect_races)):
            yield
    except Exception:
        _forget_failed_effects()
        raise
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def _forget_failed_effects() -> None:
    # JAX keeps the token of the last ordered effect. That of a failed one raises its failure again, from
    # jax.effects_barrier and when the process ends. There is no public name for dropping it.
    try:
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()
    except (ImportError, AttributeError):
        pass


@dataclass
class Races:
    """What race detection saw.

    Attributes:
        watched: whether any Pallas call ran at all.
        first: the first race; None where there was none.
    """

    watched: bool = False
    first: str | None = field(default=None)


@contextlib.contextmanager
def race_detection() -> Iterator[Races]:
    """Run every Pallas call in TPU interpret mode with race detection; the result is filled in at the end.

    Raises:
        UnsupportedOptionError: this jax does not tell its result.
    """
    found, printed = Races(), io.StringIO()
    with tpu_interpret_mode(detect_races=True):
        with contextlib.redirect_stdout(printed):
            yield found
        state = _race_state()
        found.watched = state is not None
        # The state is that of the last Pallas call only; a race in an earlier one shows in what was printed.
        text = printed.getvalue()
        if _MARK in text:
            lines = text.split(_MARK)[1].splitlines()
            found.first = "; ".join(line.strip() for line in lines if line.strip() and "clock:" not in line)
        elif state is not None and state.races_found:
            found.first = "in the last Pallas call that ran"


def _race_state() -> Any:
    # No public name: jax prints races, and sets a flag in a module of its own.
    try:
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        state = interpret_pallas_call.races
        return state if state is None or isinstance(state.races_found, bool) else None
    except (ImportError, AttributeError) as e:
        raise UnsupportedOptionError(
            f"races=True: jax {jax.__version__} has no race detection where it is looked for ({e}). Use another jax "
            "version, or pass races=False."
        ) from e
