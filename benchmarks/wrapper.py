# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What `named_kernel` costs beside the hand-written `shard_map` and `haliax.partitioning.shard_map`.

    python benchmarks/wrapper.py [--rounds 3] [--json FILE]

Same kernel (the Pallas linear attention of `examples/linear_attention_thread.py`, with its backward), same mesh (8
simulated CPU devices: data 4 x model 2, batch and heads sharded), same run. Compared: instructions of the compiled
program by kind, trace time of the forward and of the gradient (a new function each time, nothing of it cached), and
the second eager call beside the bare jitted one. Single times on a shared machine mean little: look at the ratios.

Trace times are means over many depths of the Python call stack, the ways interleaved: CPython 3.11 and 3.12 call
functions slower where the stack crosses from one chunk of memory to the next, which makes any single depth up to 1.4
times as slow as another, for each way at depths of its own.
"""

import argparse
import gc
import json
import os
import pathlib
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import shard_map as haliax_shard_map
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
from linear_attention_thread import linear_attention

from haliax_kernels import named_kernel

B, H, Pos, D = (Axis(n, s) for n, s in (("batch", 8), ("heads", 4), ("position", 256), ("head_size", 32)))
MAPPING = {"batch": "data", "heads": "model"}
SPEC = P("data", "model")
DEPTHS = range(0, 128, 4)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The user's kernel: plain arrays (position, size), three Pallas kernels with carries, a custom_vjp."""
    return linear_attention(q, k, v, True)


def ours() -> Callable[..., jax.Array]:
    decorate = named_kernel("position key, position key, position value -> position value", name="attention")
    kernel = decorate(attention).bind(key="head_size", value="head_size")
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


def layers(f: Callable[..., jax.Array], count: int = 8) -> Callable[..., jax.Array]:
    """`count` calls in a row, as the layers of a model make them where they are not scanned over."""

    def run(q: NamedArray, k: NamedArray, v: NamedArray) -> jax.Array:
        for _ in range(count):
            q = NamedArray(f(q, k, v), q.axes)
        return q.array

    return run


PROGRAMS = {"forward": lambda f: f, "gradient": gradient, "8 layers": lambda f: gradient(layers(f))}


def instructions(hlo: str) -> Counter[str]:
    """Instructions of the compiled program by kind."""
    kinds = re.findall(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][a-z0-9\-]*)\(", hlo, re.MULTILINE)
    return Counter(k.removesuffix("-start").removesuffix("-done") for k in kinds)


def seconds(f: Callable[[], Any]) -> float:
    """Time of one call, without garbage collections in between, as `timeit` does it."""
    gc.disable()
    began = time.perf_counter()
    f()
    spent = time.perf_counter() - began
    gc.enable()
    return spent


def at_depth(n: int, f: Callable[[], float]) -> float:
    """`f()`, called from `n` frames further down."""
    return f() if n == 0 else at_depth(n - 1, f)


def measure(rounds: int) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    results: dict[str, Any] = {"jax": jax.__version__, "rounds": rounds}
    with jax.set_mesh(mesh), hax.axis_mapping(MAPPING):
        keys = jax.random.split(jax.random.key(0), 3)
        args = [hax.shard(hax.random.normal(k, (B, H, Pos, D))) for k in keys]
        for what, wrap in PROGRAMS.items():
            times: dict[str, list[float]] = {name: [] for name in WAYS}
            for name in WAYS:  # warm the caches that all share
                jax.jit(wrap(WAYS[name]())).trace(*args)
            depths = list(DEPTHS) * rounds if what != "8 layers" else list(DEPTHS)[::4]
            for n, depth in enumerate(depths):
                for name in list(WAYS) if n % 2 else list(WAYS)[::-1]:
                    f = wrap(WAYS[name]())
                    times[name].append(at_depth(depth, lambda f=f: seconds(lambda: jax.jit(f).trace(*args))))
            base = statistics.mean(times["by hand"])
            for name in WAYS:
                hlo = jax.jit(wrap(WAYS[name]())).lower(*args).compile().as_text()
                kinds = instructions(hlo)
                results[f"{what}, {name}"] = {
                    "instructions": sum(kinds.values()),
                    "copies": kinds["copy"] + kinds["transpose"],
                    "collectives": {k: kinds[k] for k in COLLECTIVES if kinds[k]},
                    "trace_ms": 1e3 * statistics.mean(times[name]),
                    "trace_ratio": statistics.mean(times[name]) / base,
                }
        results["second eager call"] = eager(args)
    return results


def eager(args: list[NamedArray], rounds: int = 15, calls: int = 40) -> dict[str, float]:
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="also write everything here")
    options = parser.parse_args()
    results = measure(options.rounds)
    print(f"jax {results['jax']}, trace times are means over {len(DEPTHS)} call depths x {options.rounds} rounds")
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
