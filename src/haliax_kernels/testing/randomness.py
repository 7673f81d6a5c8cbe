# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Kernels that draw random numbers: whether shards repeat each other's, and what can be compared between shardings."""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from haliax_kernels.plan import AxisPlan, KernelPlan
from haliax_kernels.policies import Parallel
from haliax_kernels.testing.blame import Blame
from haliax_kernels.testing.call import Arrays, KernelCall, Runner
from haliax_kernels.testing.compare import compare
from haliax_kernels.testing.report import Sharding

_KEYS = 4


def random_outputs(call: KernelCall, runner: Runner) -> tuple[int, ...]:
    """The outputs that depend on the call's PRNG keys."""
    if not call.keys:
        return ()
    tried = [runner(_with_keys(call, call.arrays, n)).values for n in range(_KEYS)]
    return tuple(
        i for i in range(len(tried[0])) if any(compare(one[i], tried[0][i], 0) is not None for one in tried[1:])
    )


def comparable(plan: KernelPlan) -> bool:
    """Whether no key is folded with the shard's index, so that values do not depend on the sharding."""
    return not any(x.fold for x in plan.inputs)


def check_draws(
    call: KernelCall, mesh: Mesh, axes: Mapping[str, AxisPlan], sharding: Sharding, outputs: tuple[int, ...]
) -> bool:
    """Give every shard along a loop or Parallel axis the same data, and see that they draw different numbers.

    Returns:
        Whether there was such an axis to check.

    Raises:
        KernelCheckError: shards repeat each other's numbers.
    """
    ((axis, _),) = sharding
    if not (axes[axis].loop or isinstance(axes[axis].policy, Parallel)):
        return False
    plan = call.plan(sharding, mesh)
    dims = {j: [a.name for a in plan.outputs[j].axes].index(axis) for j in outputs}
    shards = next(a.shards for x in plan.inputs for a in x.axes if a.name == axis and a.shards > 1)
    runner = call.runner(sharding, mesh)
    arrays = _tiled(call, plan, axis, shards)
    repeated = {j: dict.fromkeys(itertools.combinations(range(shards), 2), True) for j in outputs}
    for n in range(_KEYS):
        values = runner(_with_keys(call, arrays, n)).values
        for j in outputs:
            parts = np.split(values[j], shards, axis=dims[j])
            for p, q in repeated[j]:
                repeated[j][p, q] &= compare(parts[p], parts[q], 0) is None
    found = [j for j in outputs if any(repeated[j].values())]
    if found:
        raise Blame(call.name, mesh, axes, sharding).repeats(axis, shards, found)
    return True


def _tiled(call: KernelCall, plan: KernelPlan, axis: str, shards: int) -> Arrays:
    """The call's arrays, with the first shard's part of each in every shard; keys stay as they are."""
    arrays = list(call.arrays)
    for i, x in enumerate(plan.inputs):
        for dim, a in enumerate(x.axes):
            if a.name == axis and i not in call.keys:
                part = jax.lax.slice_in_dim(arrays[i], 0, a.size // shards, axis=dim)
                arrays[i] = jnp.concatenate([part] * shards, axis=dim)
    return tuple(arrays)


def _with_keys(call: KernelCall, arrays: Arrays, n: int) -> Arrays:
    """Other keys: those of the call, folded with `n`."""
    changed = list(arrays)
    for i in call.keys:
        fold = jax.random.fold_in
        for _ in range(changed[i].ndim):
            fold = jax.vmap(fold, in_axes=(0, None))
        changed[i] = fold(changed[i], n)
    return tuple(changed)
