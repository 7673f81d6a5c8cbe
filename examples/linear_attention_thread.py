# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""From a Pallas kernel that works on one device to the same kernel on a mesh, in one decorator.

Run it with `python examples/linear_attention_thread.py`. It needs no accelerator: it simulates four devices on the
CPU, runs the kernels in Pallas' interpret mode, and lowers them for TPU to show what a TPU program would do.

  1. A linear attention written in Pallas, with its own backward, is right on one device.
  2. With the batch sharded, the bare call cannot be lowered for TPU.
  3. Wrapped with `named_kernel`, it runs with batch and heads sharded: same values, same gradients, and it lowers.
  4. With the position axis sharded, which this kernel cannot do, the call is refused before anything runs. One
     of the ways out that the message offers is then taken.
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools
import textwrap

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_kernels import Gather, named_kernel
from haliax_kernels.errors import ShardedAxisError

TILE = 128  # positions that one grid step works on
EPSILON = 1e-6  # keeps the normaliser away from zero


# --- The user's kernel. Nothing in this part knows of Haliax, meshes or sharding. ----------------------------


def features(x):
    """elu(x) + 1, written so that it stays positive for very negative x."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def features_slope(x):
    return jnp.where(x > 0, jnp.ones_like(x), jnp.exp(jnp.minimum(x, 0)))


def _dot(a, b, contract):
    """Matrix product over axis contract[0] of `a` and contract[1] of `b`, accumulated in float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _up_to_now(pairs):
    """Zero the entries (query, key) of a tile in which the key comes after the query."""
    query = jax.lax.broadcasted_iota(jnp.int32, pairs.shape, 0)
    key = jax.lax.broadcasted_iota(jnp.int32, pairs.shape, 1)
    return jnp.where(key <= query, pairs, 0.0)


def _clear_at_first_tile(*carries):
    @pl.when(pl.program_id(0) == 0)
    def _():
        for carry in carries:
            carry[...] = jnp.zeros_like(carry)


def _forward_kernel(q_ref, k_ref, v_ref, out_ref, norm_ref, kv_sum, k_sum):
    """Walks from the first tile to the last; the carries hold everything that came before the tile."""
    _clear_at_first_tile(kv_sum, k_sum)
    q, k = features(q_ref[...].astype(jnp.float32)), features(k_ref[...].astype(jnp.float32))
    v = v_ref[...].astype(jnp.float32)
    weights = _up_to_now(_dot(q, k, (1, 1)))
    norm = jnp.sum(weights, 1, keepdims=True) + jnp.sum(q * k_sum[...], 1, keepdims=True) + EPSILON
    out = (_dot(weights, v, (1, 0)) + _dot(q, kv_sum[...], (1, 0))) / norm
    out_ref[...] = out.astype(out_ref.dtype)
    norm_ref[...] = norm
    kv_sum[...] += _dot(k, v, (0, 0))
    k_sum[...] += jnp.sum(k, 0, keepdims=True)


def _query_gradient_kernel(q_ref, k_ref, v_ref, d_sum_ref, d_norm_ref, dq_ref, kv_sum, k_sum):
    """dq needs what came before: the forward's walk and the forward's carries once more."""
    _clear_at_first_tile(kv_sum, k_sum)
    q, k, v = (ref[...].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
    d_sum, d_norm = d_sum_ref[...], d_norm_ref[...]
    d_weights = _up_to_now(_dot(d_sum, v, (1, 1)) + d_norm)
    slope, k = features_slope(q), features(k)
    d_features = _dot(d_weights, k, (1, 0)) + _dot(d_sum, kv_sum[...], (1, 1)) + d_norm * k_sum[...]
    dq_ref[...] = (d_features * slope).astype(dq_ref.dtype)
    kv_sum[...] += _dot(k, v, (0, 0))
    k_sum[...] += jnp.sum(k, 0, keepdims=True)


def _key_value_gradient_kernel(q_ref, k_ref, v_ref, d_sum_ref, d_norm_ref, dk_ref, dv_ref, d_kv_sum, d_k_sum):
    """dk and dv need what comes after: walks from the last tile to the first, with carries of its own."""
    _clear_at_first_tile(d_kv_sum, d_k_sum)
    q, k, v = (ref[...].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
    d_sum, d_norm = d_sum_ref[...], d_norm_ref[...]
    q, slope, k = features(q), features_slope(k), features(k)
    weights = _up_to_now(_dot(q, k, (1, 1)))
    d_weights = _up_to_now(_dot(d_sum, v, (1, 1)) + d_norm)
    d_features = _dot(d_weights, q, (0, 0)) + _dot(v, d_kv_sum[...], (1, 1)) + d_k_sum[...]
    dk_ref[...] = (d_features * slope).astype(dk_ref.dtype)
    dv_ref[...] = (_dot(weights, d_sum, (0, 0)) + _dot(k, d_kv_sum[...], (1, 0))).astype(dv_ref.dtype)
    d_kv_sum[...] += _dot(q, d_sum, (0, 0))
    d_k_sum[...] += jnp.sum(q * d_norm, 0, keepdims=True)


def _walk(kernel, inputs, outputs, key_size, value_size, *, backwards, interpret):
    """Run `kernel` over tiles of (position, width) arrays; `outputs` lists (width, dtype)."""
    positions = inputs[0].shape[0]
    if positions % TILE:
        raise ValueError(f"the number of positions must be a multiple of {TILE}, got {positions}")
    tiles = positions // TILE

    def tile(width):
        return pl.BlockSpec((TILE, width), lambda i: (tiles - 1 - i, 0) if backwards else (i, 0))

    return pl.pallas_call(
        kernel,
        grid=(tiles,),
        in_specs=[tile(x.shape[1]) for x in inputs],
        out_specs=[tile(width) for width, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((positions, width), dtype) for width, dtype in outputs],
        scratch_shapes=[pltpu.VMEM((key_size, value_size), jnp.float32), pltpu.VMEM((1, key_size), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
    )(*inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear_attention(q, k, v, interpret=False):
    """Causal linear attention. q, k: (position, key); v: (position, value); the result: (position, value)."""
    return _linear_attention_forward(q, k, v, interpret)[0]


def _linear_attention_forward(q, k, v, interpret):
    outputs = [(v.shape[1], v.dtype), (1, jnp.float32)]
    out, norm = _walk(
        _forward_kernel, (q, k, v), outputs, q.shape[1], v.shape[1], backwards=False, interpret=interpret
    )
    return out, (q, k, v, out, norm)


def _linear_attention_backward(interpret, saved, d_out):
    q, k, v, out, norm = saved
    # out = weighted sum / norm: the cotangents of the two.
    d_out = d_out.astype(jnp.float32)
    d_sum = d_out / norm
    d_norm = -jnp.sum(d_sum * out.astype(jnp.float32), 1, keepdims=True)
    inputs, sizes = (q, k, v, d_sum, d_norm), (q.shape[1], v.shape[1])
    (dq,) = _walk(
        _query_gradient_kernel, inputs, [(q.shape[1], q.dtype)], *sizes, backwards=False, interpret=interpret
    )
    outputs = [(k.shape[1], k.dtype), (v.shape[1], v.dtype)]
    dk, dv = _walk(_key_value_gradient_kernel, inputs, outputs, *sizes, backwards=True, interpret=interpret)
    return dq, dk, dv


linear_attention.defvjp(_linear_attention_forward, _linear_attention_backward)


# --- The same kernel on NamedArrays and meshes: this is all there is to write. -------------------------------


@named_kernel("position key, position key, position value -> position value")
def attend(q, k, v, *, interpret=False):
    return linear_attention(q, k, v, interpret)


# --- The story. ----------------------------------------------------------------------------------------------


def recurrence(q, k, v):
    """What the kernel must compute, one position after the other."""

    def step(carry, now):
        kv_sum, k_sum = carry
        q, k, v = now
        kv_sum, k_sum = kv_sum + jnp.outer(k, v), k_sum + k
        return (kv_sum, k_sum), q @ kv_sum / (q @ k_sum + EPSILON)

    zeros = jnp.zeros((k.shape[1], v.shape[1]), v.dtype), jnp.zeros(k.shape[1], v.dtype)
    return jax.lax.scan(step, zeros, (features(q), features(k), v))[1]


def values_and_gradients(fn, inputs, weights):
    """The result of `fn(*inputs)`, and the gradients of its sum weighted by `weights`."""
    out, pullback = jax.vjp(fn, *inputs)
    return [np.asarray(x) for x in (out, *pullback(weights))]


def relative_errors(ours, theirs):
    """The largest difference over the largest value, for the result and for each gradient."""
    pairs = zip(ours, theirs, strict=True)
    return {name: float(np.abs(a - b).max() / np.abs(b).max()) for name, (a, b) in zip("oqkv", pairs, strict=False)}


def one_device_errors(positions=256, key_size=16, value_size=24, seed=0):
    """Errors of the float32 kernel against the recurrence in float64."""
    rng = np.random.default_rng(seed)
    shapes = [(positions, key_size), (positions, key_size), (positions, value_size)]
    inputs = [rng.normal(size=shape) for shape in shapes]
    weights = rng.normal(size=shapes[-1])
    with jax.enable_x64(True):
        exact = values_and_gradients(jax.jit(recurrence), [jnp.asarray(x) for x in inputs], jnp.asarray(weights))
    assert exact[0].dtype == np.float64
    single = [jnp.asarray(x, jnp.float32) for x in (*inputs, weights)]
    run = jax.jit(functools.partial(linear_attention, interpret=True))
    return relative_errors(values_and_gradients(run, single[:3], single[3]), exact)


def lower_for_tpu(fn, *args):
    """Trace `fn` and lower it for TPU, which works on any host; returns the program text."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def show(errors):
    return ", ".join(f"{'out' if name == 'o' else 'd' + name} {error:.1e}" for name, error in errors.items())


def indented(text):
    return textwrap.indent(str(text), "   ")


def largest(errors, limit):
    if max(errors.values()) > limit:
        raise SystemExit(f"the errors exceed {limit}: {show(errors)}")
    return show(errors)


def main():
    Batch, Heads, Pos = Axis("batch", 4), Axis("heads", 2), Axis("position", 256)
    Key, Value = Axis("key", 16), Axis("value", 24)
    mapping = {"batch": "data", "heads": "model"}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    print("1. On one device the kernel is right.")
    print("   relative error against a float64 recurrence:", largest(one_device_errors(), 1e-5))

    keys = jax.random.split(jax.random.key(0), 4)
    query, key = (hax.random.normal(k, (Batch, Heads, Pos, Key)) for k in keys[:2])
    value, weights = (hax.random.normal(k, (Batch, Heads, Pos, Value)) for k in keys[2:])
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    q, k, v = (jax.device_put(x.array, sharding) for x in (query, key, value))

    print("\n2. The bare kernel with batch and heads sharded over four devices, for TPU:")
    try:
        lower_for_tpu(jax.vmap(jax.vmap(linear_attention)), q, k, v)
        raise SystemExit("it lowered, against expectation")
    except NotImplementedError as error:
        print(f"   {type(error).__name__}: {error}")

    print("\n3. The same kernel as a named_kernel:")

    @jax.jit
    def loss_and_result(query, key, value):
        out = attend(query, key, value, interpret=True)
        return hax.sum(out * weights).scalar(), out

    named = [NamedArray(x, like.axes) for x, like in zip((q, k, v), (query, key, value), strict=True)]
    whole = functools.partial(linear_attention, interpret=True)
    expected = values_and_gradients(
        jax.jit(jax.vmap(jax.vmap(whole))), (query.array, key.array, value.array), weights.array
    )
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        print(indented(attend.plan(*named, interpret=True)))
        gradients, out = jax.grad(loss_and_result, argnums=(0, 1, 2), has_aux=True)(*named)
        errors = relative_errors([np.asarray(x.array) for x in (out, *gradients)], expected)
        print("   difference from the unsharded kernel:", largest(errors, 1e-6))
        print("   the result's axes:", ", ".join(f"{axis.name} {axis.size}" for axis in out.axes))
        print("   the result's sharding:", out.array.sharding.spec)

        def loss(query, key, value):
            return hax.sum(attend(query, key, value) * weights).scalar()

        forward = lower_for_tpu(attend, *named).count("tpu_custom_call")
        both = lower_for_tpu(jax.grad(loss, argnums=(0, 1, 2)), *named).count("tpu_custom_call")
        print(f"   lowered for TPU: {forward} kernel forward, {both} in the gradient")

    print("\n4. With the position axis sharded, which the kernel needs whole:")
    with jax.set_mesh(mesh), hax.axis_mapping({"batch": "data", "position": "model"}):
        try:
            jax.jit(functools.partial(attend, interpret=True))(*named)
            raise SystemExit("it ran, against expectation")
        except ShardedAxisError as error:
            print(indented(f"{type(error).__name__}: {error}"))
        gathering = attend.with_policies(position=Gather())
        result = jax.jit(functools.partial(gathering, interpret=True))(*named)
        errors = relative_errors([np.asarray(result.array)], expected[:1])
        print("   with Gather() it runs; difference from the unsharded kernel:", largest(errors, 1e-6))


if __name__ == "__main__":
    main()
