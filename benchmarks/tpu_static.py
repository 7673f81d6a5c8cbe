# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Estimated cycles of the attention kernels on a TPU, without a TPU, beside those of JAX's own.

    python benchmarks/tpu_static.py [--topology v5e:2x2] [--lengths 2048 4096] [--sizes 64 128] [--json FILE]

The PyPI package libtpu holds the TPU compiler, which can write down the final schedule of a kernel: bundles of
instructions, one a cycle when nothing stalls. Counted are a kernel's bundles times how often they run: the loop over
its grid, the loops inside, and the bodies under a condition. What the schedule does not show, waits for memory and for
full matrix units, is not in the figures, which are for comparing kernels with each other and not with a clock.

Of JAX's kernels the bodies without matrix products (what begins and ends a row of blocks) are left out, and of those
with them the visible share of the grid is counted. Of ours everything is counted, each body as often as the schedule
names it. The bound is the useful operations, the backward's 2.5 times the forward's, at the matrix units' peak.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

DUMP = pathlib.Path(tempfile.mkdtemp(prefix="tpu_static_"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["LIBTPU_INIT_ARGS"] = (
    os.environ.get("LIBTPU_INIT_ARGS", "")
    + f" --xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
)

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels.attention import pallas_tpu
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.pallas_tpu.schedule import SPECIAL, Tiles
from haliax_kernels.attention.pallas_tpu.sizes import choose
from haliax_kernels.testing import topology_mesh

# bfloat16 operations per cycle of one chip: peak operations per second over the clock.
PEAK = {"v4": 262144, "v5e": 131072, "v5p": 262144, "v6e": 524288}
HEADS = 2


# --- the schedule ----------------------------------------------------------------------------------------------------


@dataclass
class Body:
    """Bundles `start` to `end`: a kernel, a loop, or what runs under a condition."""

    kind: str
    start: int
    end: int
    trips: int = 1
    inner: list["Body"] = field(default_factory=list)

    def insert(self, other: "Body") -> None:
        for body in self.inner:
            if body.start <= other.start and other.end <= body.end:
                return body.insert(other)
        self.inner.append(other)

    @property
    def bundles(self) -> int:
        return self.end - self.start + 1

    @property
    def own(self) -> int:
        return self.bundles - sum(body.bundles for body in self.inner)


@dataclass(frozen=True)
class Kernel:
    name: str
    root: Body
    mxu: list[int]

    def multiplies(self, body: Body) -> bool:
        return any(self.mxu[body.start : body.end + 1])

    def cycles(self, body: Body, active: float) -> float:
        """Of one run of `body`, where a share `active` of the grid is visible."""
        total = float(body.own)
        for inner in body.inner:
            if inner.kind == "loop":
                total += inner.trips * self.cycles(inner, active)
            elif self.multiplies(inner):
                guard = any(self.multiplies(b) for b in inner.inner)
                total += self.cycles(inner, active) * (1 if guard else active)
        return total

    def cycles_of_ours(self, runs: list[int], steps: int) -> float:
        """Where each body under a condition runs as often as `runs` says, in the program's order.

        `steps` are those of the whole grid. The two TensorCores of a v4 or v5p share it; the loop's turns show that.
        """
        (loop,) = [b for b in self.root.inner if b.kind == "loop"]
        (guard,) = [b for b in loop.inner if self.multiplies(b)]
        if len(guard.inner) != len(runs):
            raise ValueError(f"{self.name}: {len(guard.inner)} bodies, expected {len(runs)}")
        cores = max(1, round(steps / loop.trips))
        total = self.root.own + loop.trips * (loop.own + guard.own)
        return total + sum(n / cores * self.cycles(body, 1) for n, body in zip(runs, guard.inner, strict=True))


def parse(text: str) -> Body:
    """The loops and conditions of a schedule, from its branches and the regions that they name."""
    bundles: list[str] = []
    for line in text.splitlines():
        if re.match(r"\s*(0x[0-9a-f]+|0)\s+(\w\w)?\s*:", line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line
    regions: dict[str, int] = {}
    for n, bundle in enumerate(bundles):
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", bundle):
            regions.setdefault(region, n)
    found: list[Body] = []
    heads: list[int] = []
    for n, bundle in enumerate(bundles):
        if re.match(r"\s*\S+\s+LB", bundle):
            heads.append(n)
        for region in re.findall(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", bundle):
            target = regions.get(region, -1)
            # The four bundles after a branch run in any case.
            if target > n + 5:
                found.append(Body("condition", n + 5, target - 1))
            elif target <= n and heads:
                head = heads.pop()
                test = r"scmp\.[a-z]+\.[su]32\.totalorder %s\w+, (\d+) /\* loop exit test"
                trips = re.findall(test, "".join(bundles[max(head, n - 40) : n + 1]))
                if not trips:
                    raise ValueError("a loop whose number of turns is not a constant")
                found.append(Body("loop", head, min(n + 4, len(bundles) - 1), int(trips[-1])))
    root = Body("kernel", 0, len(bundles) - 1)
    for body in sorted(found, key=lambda b: (b.start, -b.end)):
        root.insert(body)
    return root


def compiled_kernels(f: Callable[..., Any], args: tuple[Any, ...], seen: set[str]) -> Iterator[Kernel]:
    """Compile, and read the schedules of the Pallas kernels that are new in the dump."""
    jax.jit(f).trace(*args).lower().compile()
    for path in sorted(DUMP.glob("*-final_bundles.txt")):
        if path.name in seen or "schedule-analysis" in path.name:
            continue
        seen.add(path.name)
        text = path.read_text()
        if "window_params" not in text and "window allocation" not in text:
            continue
        (units,) = DUMP.glob(f"{path.name.split('-')[0]}-*final_hlo-static-per-bundle-utilization.txt")
        rows = [line.split() for line in units.read_text().splitlines()]
        # The first column of numbers counts what the matrix units do.
        mxu = [int(row[0]) for row in rows if len(row) >= 10 and all(x.isdigit() for x in row[:10])]
        yield Kernel(re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", path.name), parse(text), mxu)


# --- what is compared ------------------------------------------------------------------------------------------------


def theirs(attention: Callable[..., Any], active: float) -> Callable[..., tuple[float, float]]:
    """Forward, and forward with backward, of a function of q, k and v: (heads, positions, size)."""

    def measure(args: tuple[Any, ...], seen: set[str]) -> tuple[float, float]:
        def gradient(q, k, v, do):
            o, pullback = jax.vjp(attention, q, k, v)
            return o, pullback(do)

        forward = sum(k.cycles(k.root, active) for k in compiled_kernels(attention, args[:3], seen))
        return forward, sum(k.cycles(k.root, active) for k in compiled_kernels(gradient, args, seen))

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

    def cycles(f: Callable[..., Any], args: tuple[Any, ...], seen: set[str], is_backward: bool) -> float:
        sizes = choose(options, 1, length, length, (size, size), jnp.dtype(jnp.bfloat16), 0, is_backward)
        total = 0.0
        starts = range(0, length, sizes.keys) if is_backward else [0]
        for start, kernel in zip(starts, compiled_kernels(f, args, seen), strict=True):
            keys = min(sizes.keys, length - start) if is_backward else length
            tiles = Tiles(length, keys, sizes.q, min(sizes.k, sizes.keys), left, 0, -start)
            steps = tiles.steps(-start)
            counts = Counter(int(flags) & 15 for flags in steps.flags)
            bodies = [counts[body] for body in steps.bodies]
            if is_backward:
                runs = [1, tiles.k_count, *bodies, tiles.q_count, tiles.k_count]
            else:
                runs = [1, *bodies, tiles.q_count]
            if len(steps.flags) == 1:  # being the first step is no condition
                runs = runs[1:]
            assert SPECIAL + len(tiles.special) > max(steps.bodies)
            total += kernel.cycles_of_ours([HEADS * n for n in runs], HEADS * len(steps.flags))
        return total

    def measure(args: tuple[Any, ...], seen: set[str]) -> tuple[float, float]:
        first = cycles(forward, args[:3], seen, False)
        return first, first + cycles(backward, args, seen, True)

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
