# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Pallas' TPU interpret mode, with and without race detection. The one place that reaches into JAX's own modules."""

import contextlib
import io
import logging
import threading
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
    with _first_failure() as first:
        try:
            with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=detect_races)):
                yield
        except Exception as e:
            _forget_failed_effects()
            cause = first.wait() if threading.BrokenBarrierError.__name__ in str(e) else None
            if cause is not None:
                raise cause from e
            raise
        finally:
            pltpu.reset_tpu_interpret_mode_state()


class _FirstFailure(logging.Handler):
    """Where one simulated device fails, the others stop at a barrier, and JAX raises whichever it meets first. It logs
    all of them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._error: BaseException | None = None
        self._arrived = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self._error is None and not isinstance(error, threading.BrokenBarrierError):
            self._error = error
            self._arrived.set()

    def wait(self) -> BaseException | None:
        """What failed other than a barrier. Its device may be logging it still; None if nothing comes."""
        self._arrived.wait(timeout=10)
        return self._error


@contextlib.contextmanager
def _first_failure() -> Iterator[_FirstFailure]:
    handler, logger = _FirstFailure(), logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


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
