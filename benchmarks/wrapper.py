# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What `named_kernel` costs beside the hand-written `shard_map` and `haliax.partitioning.shard_map`.

    python benchmarks/wrapper.py [--rounds 15] [--json FILE]

Same kernel (full attention with its own backward, in Pallas), same mesh (8 simulated CPU devices: data 4 x model 2,
batch and heads sharded), same run. Compared: instructions of the compiled program by kind, trace time of the forward
and of the gradient (each traced anew, nothing cached), and the second eager call beside the bare jitted one. Times
are medians over interleaved rounds, given as ratios; single times on a shared machine mean little.
"""

import argparse
import gc
import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import shard_map as haliax_shard_map
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from haliax_kernels import named_kernel

B, H, Pos, KPos, D = (
    Axis(n, s) for n, s in (("batch", 8), ("heads", 4), ("position", 64), ("key_position", 64), ("head_size", 32))
)
AXES = {"q_pos": "position", "k_pos": "key_position", "key": "head_size", "value": "head_size"}
MAPPING = {"batch": "data", "heads": "model"}
SPEC = P("data", "model")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def _weights(q: jax.Array, k: jax.Array) -> jax.Array:
    s = jnp.dot(q, k.T, preferred_element_type=jnp.float32)
    p = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return p / jnp.sum(p, axis=-1, keepdims=True)


def _forward_kernel(q: Any, k: Any, v: Any, o: Any) -> None:
    o[...] = jnp.dot(_weights(q[...], k[...]), v[...], preferred_element_type=jnp.float32)


def _backward_kernel(q: Any, k: Any, v: Any, o: Any, do: Any, dq: Any, dk: Any, dv: Any) -> None:
    p = _weights(q[...], k[...])
    dp = jnp.dot(do[...], v[...].T, preferred_element_type=jnp.float32)
    ds = p * (dp - jnp.sum(do[...] * o[...], axis=-1, keepdims=True))
    dq[...] = jnp.dot(ds, k[...], preferred_element_type=jnp.float32)
    dk[...] = jnp.dot(ds.T, q[...], preferred_element_type=jnp.float32)
    dv[...] = jnp.dot(p.T, do[...], preferred_element_type=jnp.float32)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((q.shape[0], v.shape[1]), q.dtype)
    return pl.pallas_call(_forward_kernel, out_shape=out, interpret=True)(q, k, v)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    o = attention(q, k, v)
    return o, (q, k, v, o)


def _backward(saved: tuple[jax.Array, ...], do: jax.Array) -> tuple[jax.Array, ...]:
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3]]
    return tuple(pl.pallas_call(_backward_kernel, out_shape=outs, interpret=True)(*saved, do))


attention.defvjp(_forward, _backward)


def ours() -> Callable[..., jax.Array]:
    kernel = named_kernel("q_pos key, k_pos key, k_pos value -> q_pos value", name="attention")(attention).bind(**AXES)
    return lambda q, k, v: kernel(q, k, v).array


def by_hand() -> Callable[..., jax.Array]:
    local = jax.vmap(jax.vmap(attention))
    mapped = jax.shard_map(local, in_specs=(SPEC,) * 3, out_specs=SPEC, check_vma=False)
    return lambda q, k, v: mapped(q.array, k.array, v.array)


def by_haliax() -> Callable[..., jax.Array]:
    def local(q: NamedArray, k: NamedArray, v: NamedArray) -> NamedArray:
        return NamedArray(jax.vmap(jax.vmap(attention))(q.array, k.array, v.array), q.axes)

    return lambda q, k, v: haliax_shard_map(local)(q, k, v).array


WAYS = {"by hand": by_hand, "named_kernel": ours, "haliax shard_map": by_haliax}


def gradient(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    def backward(q: NamedArray, k: NamedArray, v: NamedArray) -> Any:
        o, pullback = jax.vjp(f, q, k, v)
        return pullback(o)

    return backward


def instructions(hlo: str) -> Counter[str]:
    """Instructions of the compiled program by kind."""
    kinds = re.findall(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(", hlo, re.MULTILINE)
    return Counter(k.removesuffix("-start").removesuffix("-done") for k in kinds)


def seconds(f: Callable[[], Any]) -> float:
    gc.collect()
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def measure(rounds: int) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    results: dict[str, Any] = {"jax": jax.__version__, "rounds": rounds}
    with jax.set_mesh(mesh), hax.axis_mapping(MAPPING):
        keys = jax.random.split(jax.random.key(0), 3)
        args = [hax.shard(hax.random.normal(k, (B, H, p, D))) for k, p in zip(keys, (Pos, KPos, KPos), strict=True)]
        for what, wrap in (("forward", lambda f: f), ("gradient", gradient)):
            times: dict[str, list[float]] = {name: [] for name in WAYS}
            for i in range(rounds + 2):
                for name in list(WAYS) if i % 2 else list(WAYS)[::-1]:
                    f = wrap(WAYS[name]())
                    spent = seconds(lambda f=f: jax.jit(f).trace(*args))
                    if i >= 2:  # the first rounds warm caches that all share
                        times[name].append(spent)
            base = times["by hand"]
            for name in WAYS:
                hlo = jax.jit(wrap(WAYS[name]())).lower(*args).compile().as_text()
                kinds = instructions(hlo)
                results[f"{what}, {name}"] = {
                    "instructions": sum(kinds.values()),
                    "copies": kinds["copy"] + kinds["transpose"],
                    "collectives": {k: kinds[k] for k in COLLECTIVES if kinds[k]},
                    "trace_ms": 1e3 * statistics.median(times[name]),
                    "trace_ratio": statistics.median(a / b for a, b in zip(times[name], base, strict=True)),
                }
        results["second eager call"] = eager(args, rounds)
    return results


def eager(args: list[NamedArray], rounds: int, calls: int = 40) -> dict[str, float]:
    """Milliseconds of a repeated eager call, and of the bare jitted shard_map."""
    kernel, bare = ours(), jax.jit(by_hand())
    ready = {"named_kernel": lambda: kernel(*args), "bare jitted": lambda: bare(*args)}
    spent: dict[str, list[float]] = {name: [] for name in ready}
    for f in ready.values():
        f().block_until_ready()
    for _ in range(rounds):
        for name, f in ready.items():
            per_call = []
            for _ in range(calls):
                began = time.perf_counter()
                f().block_until_ready()
                per_call.append(time.perf_counter() - began)
            spent[name].append(1e3 * statistics.median(per_call))
    found = {name: statistics.median(v) for name, v in spent.items()}
    extra = statistics.median(a - b for a, b in zip(spent["named_kernel"], spent["bare jitted"], strict=True))
    return {**found, "over the bare jitted call": extra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write everything here")
    options = parser.parse_args()
    results = measure(options.rounds)
    print(f"jax {results['jax']}, medians of {options.rounds} rounds")
    print(f"{'':28}{'trace':>10}{'ratio':>8}{'instructions':>14}{'copies':>8}  collectives")
    for key, row in results.items():
        if isinstance(row, dict) and "trace_ms" in row:
            print(
                f"{key:28}{row['trace_ms']:>7.1f} "
                f"ms{row['trace_ratio']:>8.2f}{row['instructions']:>14}{row['copies']:>8}"
                f"  {row['collectives'] or 'none'}"
            )
    print("second eager call: " + ", ".join(f"{k} {v:.3f} ms" for k, v in results["second eager call"].items()))
    if options.json:
        with open(options.json, "w") as f:
            json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
