# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Stand-in for `haliax_kernels.testing.check_kernel`."""

import contextlib
import itertools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_CHOICES = (None, "a", "b", ("a", "b"))


def check_kernel(
    kernel,
    *args,
    axes=None,
    mesh=None,
    samples=32,
    seed=0,
    gradients=True,
    reference=None,
    topology=None,
    rtol=None,
    atol=None,
    interpret=True,
    **kwargs,
):
    sizes = mesh or {"a": 2, "b": 2}
    if topology is None:
        devices = jax.devices()[:4]
    else:
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1",
            TPU_ACCELERATOR_TYPE="v5litepod-8",
            TPU_WORKER_HOSTNAMES="localhost",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        )
        devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    mesh = Mesh(np.array(devices[:4]).reshape(tuple(sizes.values())), tuple(sizes))
    floats = [i for i, x in enumerate(args) if isinstance(x, NamedArray) and jnp.issubdtype(x.dtype, jnp.floating)]

    def value(f, arguments):
        out = f(*arguments)
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(o.array if isinstance(o, NamedArray) else o for o in outs), outs

    def run(f, arguments):
        def loss(*parts):
            full = list(arguments)
            for i, part in zip(floats, parts, strict=True):
                full[i] = part
            outs = value(f, full)[0]
            total = 0
            for j, out in enumerate(outs):
                weight = jax.random.normal(jax.random.key(j), out.shape)
                total = total + jnp.sum(out.astype(jnp.float32) * weight)
            return total, outs

        if not gradients:
            return jax.tree.leaves(jax.jit(lambda *p: loss(*p)[1])(*[arguments[i] for i in floats]))
        grads, outs = jax.jit(jax.grad(loss, tuple(range(len(floats))), has_aux=True))(*[arguments[i] for i in floats])
        return jax.tree.leaves((outs, grads))

    def call(*arguments):
        return kernel(*arguments, axes=axes, **kwargs)

    def mode():
        return pltpu.force_tpu_interpret_mode() if interpret else contextlib.nullcontext()

    names = []
    for a in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, NamedArray)):
        names += [x.name for x in getattr(a, "axes", ()) if x.name not in names]
    everything = [dict(zip(names, c, strict=True)) for c in itertools.product(_CHOICES, repeat=len(names))]
    random.Random(seed).shuffle(everything)
    legal = []
    for mapping in everything:
        with jax.set_mesh(mesh):
            plan = kernel.plan(*args, axes=axes, axis_mapping=mapping, **kwargs)
        if not plan.refusals:
            legal.append({k: v for k, v in mapping.items() if v})
        if len(legal) == samples:
            break
    if topology is None:
        with mode():
            bare = run(call, args)
        if reference is not None:
            wanted = run(lambda *a: reference(*a, **kwargs), args)
            for got, want in zip(bare, wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=rtol or 1e-5, atol=atol or 1e-5)
    for mapping in legal:

        def spec(x, mapping=mapping):
            return NamedSharding(mesh, PartitionSpec(*(mapping.get(a.name) for a in x.axes)))

        def place(x):
            if not isinstance(x, NamedArray):
                return x
            if topology is None:
                return NamedArray(jax.device_put(x.array, spec(x)), x.axes)
            return NamedArray(jax.ShapeDtypeStruct(x.array.shape, x.array.dtype, sharding=spec(x)), x.axes)

        placed = jax.tree.map(place, args, is_leaf=lambda x: isinstance(x, NamedArray))

        def sharded(*arguments, mapping=mapping):
            return kernel(*arguments, axes=axes, axis_mapping=mapping, **kwargs)

        with jax.set_mesh(mesh):
            if topology is not None:

                def loss(*arguments):
                    return sum(jnp.sum(o.astype(jnp.float32)) for o in value(sharded, arguments)[0])

                f = jax.grad(loss, tuple(floats)) if gradients else sharded
                text = jax.jit(f).trace(*placed).lower().compile().as_text()
                assert "tpu_custom_call" in text, mapping
                continue
            with mode():
                found = run(sharded, placed)
        for got, want in zip(found, bare, strict=True):
            np.testing.assert_allclose(got, want, rtol=rtol or 1e-5, atol=atol or 1e-5, err_msg=str(mapping))
    return legal
