# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a call again with race detection."""

from jax.sharding import Mesh

from haliax_kernels.testing.baseline import Baseline
from haliax_kernels.testing.blame import Blame
from haliax_kernels.testing.interpret import race_detection
from haliax_kernels.testing.report import KernelCheckError, counted
from haliax_kernels.testing.shardings import Shardings


def look_for_races(base: Baseline, mesh: Mesh, shardings: Shardings) -> str:
    """Run unsharded and with each axis sharded alone.

    Returns:
        A note on what was run.

    Raises:
        KernelCheckError: there is a race, or no Pallas call to look at.
    """
    call, watched = base.call.in_interpret_mode(False), False
    for sharding in ((), *shardings.alone):
        blame = Blame(call.name, mesh, shardings.axes, sharding)
        with race_detection() as races, blame.guard():
            call.runner(sharding, mesh if sharding else None)(cotangents=base.cotangents)
        watched |= races.watched
        if races.first is not None:
            raise blame.race(races.first)
    if not watched:
        raise KernelCheckError(
            f"kernel {call.name!r}: races=True, but no Pallas call ran in TPU interpret mode: there is nothing to "
            "look at. Pass races=False."
        )
    return f"no races, unsharded and under {counted(len(shardings.alone))}"
