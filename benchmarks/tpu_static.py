# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Estimated cycles of the attention kernels on a TPU, without a TPU, beside those of JAX's own.

    python benchmarks/tpu_static.py [--topology v5e:2x2] [--lengths 2048 4096] [--sizes 64 128] [--json FILE]

Counted in the schedules that the TPU compiler writes, as `haliax_kernels.compiled.schedules` explains. The figures
are for comparing kernels with each other and not with a clock.

Of JAX's kernels the bodies without matrix products (what begins and ends a row of blocks) are left out, and of those
with them the visible share of the grid is counted. Of ours everything is counted, each body as often as the schedule
names it. The bound is the useful operations, the backward's 2.5 times the forward's, at the matrix units' peak. Above
100% of it a chip would wait for its matrix units, which the schedule does not show.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from haliax_kernels.compiled.schedules import (
    Body,
    KernelSchedule,
    UnreadableScheduleError,
    dump_schedules,
    read_schedules,
)

DUMP = pathlib.Path(tempfile.mkdtemp(prefix="tpu_static_"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
dump_schedules(DUMP)

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels.attention import pallas_tpu
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.compiled.kernels import compiled_kernels as read_kernels
from haliax_kernels.compiled.program import Program
from haliax_kernels.compiled.topologies import topology_mesh

# bfloat16 operations per cycle of one chip: peak operations per second over the clock.
PEAK = {"v4": 262144, "v5e": 131072, "v5p": 262144, "v6e": 524288}
HEADS = 2


def cycles(kernel: KernelSchedule, body: Body, active: float) -> float:
    """Of one run of `body`, where a share `active` of the grid is visible."""
    total = float(body.own)
    for inner in body.inner:
        if inner.kind == "loop":
            total += inner.trips * cycles(kernel, inner, active)
        elif kernel.multiplies(inner):
            guard = any(kernel.multiplies(b) for b in inner.inner)
            total += cycles(kernel, inner, active) * (1 if guard else active)
    return total


def compiled_kernels(f: Callable[..., Any], args: tuple[Any, ...], seen: set[str]) -> Iterator[KernelSchedule]:
    """Compile, and read the schedules of the Pallas kernels that are new in the dump."""
    jax.jit(f).trace(*args).lower().compile()
    return read_schedules(DUMP, seen)


# --- what is compared ------------------------------------------------------------------------------------------------


def theirs(attention: Callable[..., Any], active: float) -> Callable[..., tuple[float, float]]:
    """Forward, and forward with backward, of a function of q, k and v: (heads, positions, size)."""

    def measure(args: tuple[Any, ...], seen: set[str]) -> tuple[float, float]:
        def gradient(q, k, v, do):
            o, pullback = jax.vjp(attention, q, k, v)
            return o, pullback(do)

        forward = sum(cycles(k, k.root, active) for k in compiled_kernels(attention, args[:3], seen))
        return forward, sum(cycles(k, k.root, active) for k in compiled_kernels(gradient, args, seen))

    return measure


def splash_attention(length: int, q: int, k: int, fused: bool) -> Callable[..., Any]:
    backward = {} if fused else {"block_q_dq": q, "block_kv_dq": k}
    sizes = splash.BlockSizes(
        block_q=q,
        block_kv=k,
        block_kv_compute=min(k, 512),
        block_q_dkv=q,
        block_kv_dkv=k,
        block_kv_dkv_compute=min(k, 512),
        use_fused_bwd_kernel=fused,
        **backward,
    )
    mask = splash_masks.MultiHeadMask([splash_masks.CausalMask((length, length)) for _ in range(HEADS)])
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def jax_flash_attention(block: int, scale: float) -> Callable[..., Any]:
    names = jax_flash.BlockSizes.__dataclass_fields__
    sizes = jax_flash.BlockSizes(**{n: 1 if n == "block_b" else block for n in names})

    def attention(q, k, v):
        return jax_flash.flash_attention(q[None], k[None], v[None], causal=True, sm_scale=scale, block_sizes=sizes)[0]

    return attention


def ours(length: int, size: int, left: int | None) -> Callable[..., tuple[float, float]]:
    options = AttentionOptions(scale=size**-0.5, left=left, right=0)

    def forward(q, k, v):
        return jax.vmap(lambda q, k, v: pallas_tpu.forward(options, AttentionOperands(q, k, v)))(q[:, None], k, v)

    def backward(q, k, v, do):
        def one(q, k, v, do):
            rows = jnp.zeros(q.shape[:2], jnp.float32)
            return pallas_tpu.backward(options, AttentionOperands(q, k, v), rows, do, rows)[:3]

        return jax.vmap(one)(q[:, None], k, v, do[:, None])

    def cycles_of(f: Callable[..., Any], args: tuple[Any, ...], seen: set[str]) -> float:
        program = Program(jax.jit(f).trace(*args).lower().compile().as_text())
        kernels = read_kernels(program, read_schedules(DUMP, seen))
        if not all(k.exact for k in kernels):
            raise UnreadableScheduleError(f"{[k.name for k in kernels if not k.exact]} cannot be counted")
        return sum(k.total_cycles or 0 for k in kernels)

    def measure(args: tuple[Any, ...], seen: set[str]) -> tuple[float, float]:
        first = cycles_of(forward, args[:3], seen)
        return first, first + cycles_of(backward, args, seen)

    return measure


def cases(length: int, size: int) -> Iterator[tuple[str, Callable[..., tuple[float, float]]]]:
    def active(block: int) -> float:
        blocks = length // block
        return (blocks + 1) / (2 * blocks)

    yield "haliax-kernels", ours(length, size, None)
    yield "haliax-kernels, window 1024", ours(length, size, 1023)
    yield "JAX flash_attention, 512", theirs(jax_flash_attention(512, size**-0.5), active(512))
    yield "JAX splash, 512", theirs(splash_attention(length, 512, 512, False), active(512))
    yield "JAX splash, 1024, fused backward", theirs(splash_attention(length, 1024, 1024, True), active(1024))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--only", default="", help="a part of the names of what to measure")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    mesh = topology_mesh(arguments.topology, {"x": 1})
    peak = PEAK[arguments.topology.split(":")[0]]
    seen: set[str] = set()
    found = []
    print(f"{arguments.topology}, bfloat16, causal, {HEADS} heads; estimated cycles (share of the bound)")
    print("| positions | size | kernel | forward | forward and backward |\n|---|---|---|---|---|")
    for length in arguments.lengths:
        for size in arguments.sizes:
            shape = jax.ShapeDtypeStruct(
                (HEADS, length, size), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
            )
            bound = HEADS * 2 * 2 * size * length * (length + 1) / 2 / peak
            for name, measure in cases(length, size):
                if arguments.only not in name:
                    continue
                try:
                    forward, both = measure((shape,) * 4, seen)
                except Exception as e:
                    print(f"| {length} | {size} | {name} | {type(e).__name__}: {str(e).splitlines()[0][:90]} | |")
                    continue
                shares = (
                    ("", "") if "window" in name else (f" ({bound / forward:.0%})", f" ({3.5 * bound / both:.0%})")
                )
                print(
                    f"| {length} | {size} | {name} | {forward:,.0f}{shares[0]} | {both:,.0f}{shares[1]} |", flush=True
                )
                found.append({"positions": length, "size": size, "kernel": name, "forward": forward, "both": both})
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
