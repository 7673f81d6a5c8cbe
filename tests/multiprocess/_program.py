# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""One of two processes: named kernels with a `Sum`, a `Halo` and a `Manual` axis across both, and attention,
in a ring and linear.

_program.py ADDRESS INDEX
"""

import itertools
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_kernels import AttentionMask, Halo, Manual, Sum, flash_attention, linear_attention, named_kernel
from haliax_kernels.collectives import exclusive_prefix

Pos, Embed, Out = Axis("pos", 8), Axis("embed", 12), Axis("out", 3)


@named_kernel("pos embed, embed out -> pos out", policies={"pos": Halo(before=1), "embed": Sum()})
def project(x, w):
    return (x[1:] + 2 * x[:-1]) @ w


def project_reference(x, w):
    return (x + 2 * jnp.pad(x, ((1, 0), (0, 0)))[:-1]) @ w


@named_kernel("pos embed, embed out -> pos out", policies={"pos": Manual(), "embed": Sum()})
def accumulate(x, w, *, shard):
    own = jnp.cumsum(x @ w, axis=0)
    return own + exclusive_prefix(jnp.add, own[-1], 0.0, shard["pos"].mesh_axes)


def accumulate_reference(x, w):
    return jnp.cumsum(x @ w, axis=0)


def ring_attention(mesh: Mesh) -> None:
    """The sequence over all devices of both processes, against dense attention."""
    Q, K, D = Axis("position", 32), Axis("key_position", 32), Axis("head_size", 8)
    q, k, v, ct = np.random.default_rng(1).normal(size=(4, 32, 8)).astype(np.float32)

    def dense(q, k, v):
        logits = jnp.where(jnp.tri(32, dtype=bool), q @ k.T / 8**0.5, -jnp.inf)
        return jax.nn.softmax(logits) @ v

    want, pullback = jax.vjp(dense, q, k, v)
    wanted = (want, *pullback(jnp.asarray(ct)))
    sharding = NamedSharding(mesh, PartitionSpec(("process", "device")))

    def placed(value, axis):
        return hax.named(jax.make_array_from_callback(value.shape, sharding, lambda i: value[i]), (axis, D))

    for mode in ("ring", "zigzag"):

        def both(q, k, v, ct, mode=mode):
            def attend(q, k, v):
                return flash_attention(Q, K, D, q, k, v, AttentionMask.causal(), context_parallel=mode).array

            out, back = jax.vjp(attend, q, k, v)
            return out, *(g.array for g in back(ct.array))

        with jax.set_mesh(mesh), hax.axis_mapping({"position": ("process", "device")}):
            found = jax.jit(both)(placed(q, Q), placed(k, K), placed(v, K), placed(ct, Q))
        for got, expected in zip(found, wanted, strict=True):
            for shard in got.addressable_shards:
                np.testing.assert_allclose(shard.data, np.asarray(expected)[shard.index], rtol=2e-5, atol=2e-5)


def linear(mesh: Mesh) -> None:
    """Linear attention with its sequence over all devices of both processes, against its quadratic form."""
    P, D = Axis("position", 32), Axis("head_size", 8)
    q, k, v, ct = np.random.default_rng(2).uniform(0.1, 1, size=(4, 32, 8)).astype(np.float32)
    gate = -np.random.default_rng(3).exponential(0.2, size=32).astype(np.float32)
    sharding = NamedSharding(mesh, PartitionSpec(("process", "device")))

    def quadratic(q, k, v, gate):
        log = jnp.cumsum(gate)
        scores = jnp.where(jnp.tri(32, dtype=bool), (q @ k.T) * jnp.exp(log[:, None] - log[None]), 0)
        return scores @ v / scores.sum(1, keepdims=True)

    want, pullback = jax.vjp(quadratic, q, k, v, gate)

    def placed(value, *axes):
        return hax.named(jax.make_array_from_callback(value.shape, sharding, lambda i: value[i]), axes)

    def both(q, k, v, gate, ct):
        def attend(q, k, v, gate):
            return linear_attention(P, D, q, k, v, gate=gate, feature_map="identity").array

        out, back = jax.vjp(attend, q, k, v, gate)
        return out, *(g.array for g in back(ct.array))

    arguments = (*(placed(x, P, D) for x in (q, k, v)), placed(gate, P), placed(ct, P, D))
    with jax.set_mesh(mesh), hax.axis_mapping({"position": ("process", "device")}):
        found = jax.jit(both)(*arguments)
    for got, expected in zip(found, (want, *pullback(jnp.asarray(ct))), strict=True):
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(expected)[shard.index], rtol=2e-5, atol=2e-5)


def main(address: str, index: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=index)
    assert jax.process_count() == 2 and jax.device_count() == 2 * jax.local_device_count()
    r = np.random.default_rng(0)
    x, w, ct = (r.normal(size=s).astype(np.float32) for s in ((8, 12), (12, 3), (8, 3)))
    # The first mesh axis runs over the processes.
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("process", "device"))
    mappings = {"pos": "process", "embed": "device"}, {"embed": "process", "pos": "device"}
    kernels = (project, project_reference), (accumulate, accumulate_reference)
    for mapping, (kernel, reference) in itertools.product(mappings, kernels):
        want, pullback = jax.vjp(reference, x, w)
        wanted = (want, *pullback(jnp.asarray(ct)))

        def placed(value, *axes, mapping=mapping):
            sharding = NamedSharding(mesh, PartitionSpec(*(mapping.get(a.name) for a in axes)))
            return hax.named(jax.make_array_from_callback(value.shape, sharding, lambda i: value[i]), axes)

        def both(x, w, ct, kernel=kernel):
            out, back = jax.vjp(lambda x, w: kernel(x, w).array, x, w)
            return out, *(g.array for g in back(ct.array))

        with jax.set_mesh(mesh), hax.axis_mapping(mapping):
            found = jax.jit(both)(placed(x, Pos, Embed), placed(w, Embed, Out), placed(ct, Pos, Out))
        for got, expected in zip(found, wanted, strict=True):
            for shard in got.addressable_shards:
                np.testing.assert_allclose(shard.data, np.asarray(expected)[shard.index], rtol=1e-4, atol=1e-4)
    ring_attention(mesh)
    linear(mesh)
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
