# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compile a call ahead of time for a TPU topology, on a machine without a TPU."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from haliax_kernels.compiled.topologies import topology_mesh
from haliax_kernels.testing.baseline import Baseline
from haliax_kernels.testing.blame import Blame
from haliax_kernels.testing.call import with_gradients
from haliax_kernels.testing.report import counted
from haliax_kernels.testing.shardings import Shardings


def check_compiles(base: Baseline, topology: str, sizes: Mapping[str, int], shardings: Shardings) -> str:
    """Compile forward, and backward where gradients are checked, unsharded and with each axis sharded alone.

    Returns:
        A note on what was compiled.

    Raises:
        KernelCheckError: it does not compile.
        UnsupportedOptionError: there is no such topology, or no libtpu to compile with.
    """
    call, cotangents = base.call, base.cotangents
    mesh = topology_mesh(topology, sizes)
    kernels = 0
    every = ((), *shardings.alone)
    for sharding in every:
        blame = Blame(call.name, mesh, shardings.axes, sharding)
        function = call.function(sharding, mesh)
        specs = [x.spec for x in call.plan(sharding, mesh).inputs]
        arrays = [
            jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, s))
            for v, s in zip(call.arrays, specs, strict=True)
        ]
        programs: list[tuple[str, Any, tuple[Any, ...]]] = [("forward", function, tuple(arrays))]
        if cotangents is not None:
            cts = tuple(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in cotangents)
            programs.append(("gradient", with_gradients(function, call.moving), (arrays, cts)))
        for phase, f, args in programs:
            try:
                with jax.set_mesh(mesh):
                    text = jax.jit(f).trace(*args).lower().compile().as_text()
            except Exception as e:
                raise blame.does_not_compile(topology, phase, e) from e
            kernels += (text or "").count("tpu_custom_call")
    what = "forward and gradient" if cotangents is not None else "forward"
    note = f"{what} compile for TPU {topology} under {counted(len(every))}"
    return note if kernels else f"{note}, but without a single Pallas kernel: does it ask for interpret mode?"
