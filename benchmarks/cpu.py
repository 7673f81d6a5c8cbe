# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Causal attention on the CPU: ours beside Levanter's `jax_flash` and `vanilla`, and `jax.nn.dot_product_attention`.

    python benchmarks/cpu.py [--lengths 1024 2048 4096 8192] [--rounds 5] [--memory] [--json FILE]

One process, float32, batch 1, 8 heads, head size 64, the ways interleaved round by round, medians. Single times on a
shared machine mean little: look at the ratios. `--memory` prints the temporary bytes of the compiled gradient, which
grow linearly with the length for ours.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers import attention as levanter
from timing import medians

from haliax_kernels import AttentionMask, flash_attention

HEADS, SIZE = Axis("heads", 8), Axis("head_size", 64)
Ways = dict[str, Callable[..., jax.Array]]


def ways(length: int) -> Ways:
    """Each from q, k, v of (heads, length, size) to an output of the same shape."""
    Pos, KPos = Axis("position", length), Axis("key_position", length)

    def named(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[NamedArray, ...]:
        return hax.named(q, (HEADS, Pos, SIZE)), *(hax.named(x, (HEADS, KPos, SIZE)) for x in (k, v))

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(Pos, KPos, SIZE, *named(q, k, v), AttentionMask.causal()).array

    def theirs(backend: str) -> Callable[..., jax.Array]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            mask = levanter.AttentionMask.causal()
            options = {"attn_backend": levanter.AttentionBackend(backend), "flash_block_size": 1024}
            out = levanter.dot_product_attention(Pos, KPos, SIZE, *named(q, k, v), mask, **options)
            return out.rearrange((HEADS, Pos, SIZE)).array

        return run

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (jnp.swapaxes(x, 0, 1)[None] for x in (q, k, v))
        return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, is_causal=True)[0], 0, 1)

    return {"ours": ours, "jax_flash": theirs("jax_flash"), "vanilla": theirs("vanilla"), "jax.nn": plain}


def gradient(f: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        o, pullback = jax.vjp(f, q, k, v)
        return o, *pullback(o)

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="temporary bytes of the compiled gradients")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    results = []
    for length in options.lengths:
        arrays = [
            jax.random.normal(k, (HEADS.size, length, SIZE.size)) for k in jax.random.split(jax.random.key(0), 3)
        ]
        for what, wrap in (("forward", lambda f: f), ("forward + backward", gradient)):
            programs = {n: jax.jit(wrap(f)).lower(*arrays).compile() for n, f in ways(length).items()}
            found = medians({n: partial(p, *arrays) for n, p in programs.items()}, options.rounds)
            row = {"length": length, "what": what, "seconds": found}
            row["times_as_fast"] = {n: t / found["ours"] for n, t in found.items() if n != "ours"}
            text = "  ".join(f"{n} {t:.3f} s" for n, t in found.items())
            ratios = ", ".join(f"{r:.2f} x {n}" for n, r in row["times_as_fast"].items())
            print(f"S {length}, {what}: {text}; ours is as fast as {ratios}", flush=True)
            if options.memory:
                row["temporary_bytes"] = {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()}
                print(
                    "    temporary MB: " + ", ".join(f"{n} {b / 1e6:.1f}" for n, b in row["temporary_bytes"].items())
                )
            results.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "rows": results}, file, indent=1)


if __name__ == "__main__":
    main()
