# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compile a Pallas kernel for a TPU topology without a TPU: bare, and under `named_kernel`. Prints one JSON line a
case.

    python tpu_program.py v5e:2x2

A process of its own, since libtpu reads the environment when jax starts.
"""

import functools
import json
import os
import sys

TOPOLOGY = sys.argv[1] if len(sys.argv) > 1 else "v5e:2x2"
TYPES = {"v5e": "v5litepod-8", "v6e": "v6e-8", "v5p": "v5p-8", "v4": "v4-8"}
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE=TYPES[TOPOLOGY.split(":")[0]],
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else a second process is refused by a lock file
)

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from haliax_kernels import AttentionMask, Parallel, flash_attention, named_kernel
from haliax_kernels.mesh import as_mesh_axes
from support import ATTENTION, collectives, planned


def _weights(q, k):
    s = jnp.dot(q, k.T, preferred_element_type=jnp.float32)
    p = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return p / jnp.sum(p, axis=-1, keepdims=True)


def _forward_kernel(q, k, v, o):
    o[...] = jnp.dot(_weights(q[...], k[...]), v[...], preferred_element_type=jnp.float32)


def _backward_kernel(q, k, v, o, do, dq, dk, dv):
    p = _weights(q[...], k[...])
    dp = jnp.dot(do[...], v[...].T, preferred_element_type=jnp.float32)
    ds = p * (dp - jnp.sum(do[...] * o[...], axis=-1, keepdims=True))
    dq[...] = jnp.dot(ds, k[...], preferred_element_type=jnp.float32)
    dk[...] = jnp.dot(ds.T, q[...], preferred_element_type=jnp.float32)
    dv[...] = jnp.dot(p.T, do[...], preferred_element_type=jnp.float32)


def _like(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


@jax.custom_vjp
def pallas_attention(q, k, v):
    return pl.pallas_call(_forward_kernel, out_shape=_like(q)[0])(q, k, v)


def _forward(q, k, v):
    o = pallas_attention(q, k, v)
    return o, (q, k, v, o)


def _backward(saved, do):
    return tuple(pl.pallas_call(_backward_kernel, out_shape=_like(*saved[:3]))(*saved, do))


pallas_attention.defvjp(_forward, _backward)

B, H, G = Axis("batch", 4), Axis("heads", 2), Axis("group", 2)
Pos, KPos, D = Axis("position", 256), Axis("key_position", 256), Axis("head_size", 128)
AXES = {"q_pos": Pos, "k_pos": KPos, "key": D, "value": D}
CASES = {
    "batch over 4": ({"data": 4}, {"batch": "data"}),
    "batch 2 x heads 2": ({"data": 2, "model": 2}, {"batch": "data", "heads": "model"}),
    "batch over 2, 2 idle": ({"data": 2, "model": 2}, {"batch": "data"}),
    "nothing sharded": ({"data": 4}, {}),
    "group over 2": ({"data": 2, "model": 2}, {"batch": "data", "group": "model"}),
    "query position over 2": ({"data": 2, "context": 2}, {"batch": "data", "position": "context"}),
}


def abstract(axes, mesh, mapping, dtype=jnp.float32):
    spec = PartitionSpec(*(as_mesh_axes(mapping.get(a.name)) or None for a in axes))
    return NamedArray(jax.ShapeDtypeStruct([a.size for a in axes], dtype, sharding=NamedSharding(mesh, spec)), axes)


def compiled(f, *args):
    return jax.jit(f).trace(*args).lower().compile().as_text()


def report(name, check):
    try:
        print(json.dumps({"case": name, **check()}), flush=True)
    except Exception as e:
        print(json.dumps({"case": name, "error": f"{type(e).__name__}: {e}"[:2000]}), flush=True)


def make_mesh(sizes, devices, axis_type=AxisType.Auto):
    shape = tuple(sizes.values())
    return Mesh(np.array(devices[:4]).reshape(shape), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def check(f, args, wanted):
    text = compiled(f, *args)
    return {"found": collectives(text), "planned": wanted, "kernels": text.count("tpu_custom_call")}


def run_contexts(attend, devices) -> None:
    """The same kernel on an Explicit mesh, and inside a shard_map that is manual over one of the mesh axes."""
    sizes, mapping = {"data": 2, "model": 2}, {"batch": "data", "heads": "model"}
    shapes = ((B, H, G, Pos, D), (B, H, KPos, D), (B, H, KPos, D))

    def forward(q, k, v):
        return attend(q, k, v).array

    mesh = make_mesh(sizes, devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        report("explicit: forward", lambda: check(forward, [abstract(a, mesh, mapping) for a in shapes], {}))

    mesh = make_mesh(sizes, devices)
    args = [abstract(a, mesh, mapping) for a in shapes]

    def body(*arrays):
        local = [NamedArray(x, (B.resize(2), *axes[1:])) for x, axes in zip(arrays, shapes, strict=True)]
        return attend(*local, axis_mapping={"heads": "model"}).array

    def nested(q, k, v):
        spec = PartitionSpec("data")
        f = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"data"}, check_vma=False)
        return f(q.array, k.array, v.array)

    report("nested: forward", lambda: check(nested, args, {}))


def run_case(name, sizes, mapping, attend, devices) -> None:
    mesh = make_mesh(sizes, devices)
    args = [abstract(axes, mesh, mapping) for axes in ((B, H, G, Pos, D), (B, H, KPos, D), (B, H, KPos, D))]

    def bare(q, k, v):
        per_group = jax.vmap(pallas_attention, in_axes=(0, None, None))
        return jax.vmap(jax.vmap(per_group))(q.array, k.array, v.array)

    def forward(q, k, v):
        return attend(q, k, v).array

    def flash(q, k, v, ids):
        return flash_attention(Pos, KPos, D, q, k, v, AttentionMask.causal(ids)).array

    def gradient(f, q, k, v, *more):
        # The cotangent is the output's own size and sharding: only the kernel communicates.
        o, pullback = jax.vjp(lambda q, k, v: f(q, k, v, *more), q, k, v)
        return pullback(o)

    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        report(f"{name}: bare", lambda: {"hlo": bool(compiled(bare, *args))})
        plan = attend.plan(*args)
        both = planned(plan, "forward", "backward")
        report(f"{name}: forward", lambda: check(forward, args, planned(plan, "forward")))
        report(f"{name}: gradient", lambda: check(functools.partial(gradient, forward), args, both))
        if "position" in mapping or "group" in mapping:
            return
        more = [abstract(x.axes, mesh, mapping, jnp.bfloat16) for x in args] + [
            abstract((B, Pos), mesh, mapping, jnp.int32)
        ]
        report(f"{name}: flash forward", lambda: check(flash, more, {}))
        report(f"{name}: flash gradient", lambda: check(functools.partial(gradient, flash), more, {}))


def main() -> None:
    devices = topologies.get_topology_desc(topology_name=TOPOLOGY, platform="tpu").devices
    attend = named_kernel(ATTENTION, policies={"q_pos": Parallel()}, name="attend")(pallas_attention).bind(**AXES)
    for name, (sizes, mapping) in CASES.items():
        run_case(name, sizes, mapping, attend, devices)
    run_contexts(attend, devices)


if __name__ == "__main__":
    main()
