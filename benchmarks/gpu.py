# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The attention kernels on an NVIDIA GPU: right against float64, and how fast beside cuDNN's and tokamax'.

    bash benchmarks/gpu.sh [--lengths 2048 8192] [--size 128] [--rounds 20] [--check-only]

Values and gradients come first, of a few options against the float64 oracle; the script stops at the first that is
wrong. Then causal attention, bfloat16, batch 4, 16 query heads on 4 key heads, the ways interleaved round by round in
one process; printed are ratios of medians, ours divided by theirs, so that less than 1 means that ours is faster.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haliax_kernels.attention import differentiable, dropout, pallas_gpu
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.reference import dense_attention, dense_attention_grad

GROUP, Q_LEN, K_LEN, SIZE = 2, 300, 333, 80
BATCH, KV_HEADS, HEADS_PER_KV = 4, 4, 4
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias")
# Of the largest value; the 16-bit kernels round probabilities and results.
TOLERANCES = {"float32": 5e-5, "bfloat16": 1e-2, "float16": 2e-3}


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Static options and operands, by name."""
    rng = np.random.default_rng(1)
    ids = {
        name: jnp.asarray(np.sort(rng.integers(0, 4, length)), jnp.int32)
        for name, length in (("q_segment_ids", Q_LEN), ("k_segment_ids", K_LEN))
    }
    mask = {"mask": jnp.asarray(rng.random((1, Q_LEN, K_LEN)) < 0.5)}
    bias = {"bias": jnp.asarray(rng.normal(size=(GROUP, Q_LEN, K_LEN)), jnp.float32)}
    seed = {"seed": jnp.asarray([3, 4000000000], jnp.uint32)}
    offset = {"q_offset": jnp.int32(20)}
    window = {"left": 70, "right": 5}
    return {
        "none": ({}, {}),
        "causal": ({"right": 0}, {}),
        "window, offset": (window, offset),
        "segments": ({"right": 0}, ids),
        "mask": ({}, mask),
        "bias": ({}, bias),
        "soft cap": ({"soft_cap": 2.0}, {}),
        "dropout": ({"dropout": 0.2}, seed),
        "all": ({**window, "soft_cap": 2.0, "dropout": 0.2}, {**ids, **mask, **bias, **seed, **offset}),
    }


def errors(dtype: str, static: dict[str, Any], others: dict[str, Any], implementation: Any) -> dict[str, float]:
    """The largest error of each result, as a fraction of the largest value."""
    rng = np.random.default_rng(0)
    shapes = (GROUP, Q_LEN, SIZE), (K_LEN, SIZE), (K_LEN, SIZE), (GROUP, Q_LEN, SIZE)
    q, k, v, do = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    dlse = jnp.asarray(rng.normal(size=(GROUP, Q_LEN)), jnp.float32)
    options = AttentionOptions(scale=SIZE**-0.5, **static)
    x = AttentionOperands(q, k, v, **others)

    @jax.jit
    def run(x: AttentionOperands) -> tuple[Any, ...]:
        o, lse = implementation.forward(options, x)
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1) - jnp.where(lse == -jnp.inf, 0, dlse)
        return o, lse, *implementation.backward(options, x, lse, do, delta)

    got = run(x)
    dense: dict[str, Any] = {"scale": options.scale, **static, **{n: np.asarray(a) for n, a in others.items()}}
    dense["q_offset"] = int(dense.get("q_offset", 0))
    seed = dense.pop("seed", None)
    if seed is not None:
        i, j = dense["q_offset"] + np.arange(Q_LEN), np.arange(K_LEN)
        kept = dropout.keep(seed[:, None, None], i[None, :, None], j[None, None, :], options.dropout)
        dense["keep"] = np.asarray(kept)
    wide = [np.asarray(a, np.float64) for a in (q, k, v)]
    want = *dense_attention(*wide, **dense), *dense_attention_grad(*wide, np.asarray(do, np.float64), dlse, **dense)
    found = {}
    for name, a, b in zip(NAMES, got, want[:6], strict=True):
        if a is not None and b is not None:
            a, seen = np.asarray(a, np.float64), np.isfinite(b)
            # NaN, and -inf in the wrong place, are errors too.
            same = np.array_equal(a[~seen], b[~seen])
            found[name] = float(np.abs(a[seen] - b[seen]).max() / np.abs(b[seen]).max()) if same else np.inf
    return found


def check(implementation: Any = pallas_gpu) -> bool:
    """Print the errors of every case; whether all are small."""
    right = True
    for dtype, tolerance in TOLERANCES.items():
        for case, (static, others) in cases().items():
            found = errors(dtype, static, others, implementation)
            good = all(error <= tolerance for error in found.values())
            right = right and good
            figures = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
            print(f"{dtype:8} {case:14} {'right' if good else 'WRONG'}: {figures}", flush=True)
    return right


def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of (batch, position, head, size), as the others take it."""
    options = AttentionOptions(scale=q.shape[-1] ** -0.5, right=0)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return differentiable.attention(pallas_gpu, options, AttentionOperands(q, k, v))[0]

    heads = jax.vmap(one, (0, 0, 0))
    args = grouped.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return jax.vmap(heads)(*args).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """JAX's binding of cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def ways() -> dict[str, Callable[..., jax.Array]]:
    """What is timed, of what is installed."""
    found: dict[str, Callable[..., jax.Array]] = {"ours": ours, "cudnn": cudnn}
    if importlib.util.find_spec("tokamax") is not None:
        import tokamax

        found["tokamax"] = lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=True)
    return found


def with_gradient(f: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Forward and backward."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        o, pullback = jax.vjp(f, q, k, v)
        return o, *pullback(o)

    return both


def medians(programs: dict[str, Callable[..., Any]], arrays: list[jax.Array], rounds: int) -> dict[str, float]:
    """Median seconds of each program that runs, interleaved."""
    times: dict[str, list[float]] = {}
    for name, f in programs.items():
        try:
            jax.block_until_ready(f(*arrays))
            times[name] = []
        except Exception as error:  # a rival that refuses this chip or shape
            if name == "ours":
                raise
            print(f"  {name} does not run: {str(error).splitlines()[0][:100]}")
    for _ in range(rounds):
        for name, found in times.items():
            start = time.perf_counter()
            jax.block_until_ready(programs[name](*arrays))
            found.append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check-only", action="store_true")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"benchmarks/gpu.py: JAX runs on {jax.default_backend()}, not on a GPU.", file=sys.stderr)
        return 1
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if not check():
        return 1
    for length in [] if args.check_only else args.lengths:
        rng = jax.random.key(0)
        shapes = [(BATCH, length, n, args.size) for n in (KV_HEADS * HEADS_PER_KV, KV_HEADS, KV_HEADS)]
        arrays = [jax.random.normal(r, s, jnp.bfloat16) for r, s in zip(jax.random.split(rng, 3), shapes, strict=True)]
        for what, change in (("forward", lambda f: f), ("forward and backward", with_gradient)):
            found = medians({name: jax.jit(change(f)) for name, f in ways().items()}, arrays, args.rounds)
            ratios = ", ".join(f"ours/{n} {found['ours'] / t:.2f}" for n, t in found.items() if n != "ours")
            print(f"{length} positions, {what}: ours {found['ours'] * 1e3:.2f} ms; {ratios or 'nothing to compare'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
