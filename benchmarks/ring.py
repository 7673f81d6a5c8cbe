# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What attention over a sharded sequence computes and moves, counted while it runs and read from compiled programs.

    python benchmarks/ring.py [--shards 2 4 8] [--topology v5e:4x4] [--json FILE]

First table: blocks of `(positions / shards)^2` that the devices compute, counted as they do so on simulated CPU
devices, with the length of the critical path: at each step the slowest device's blocks, added up. `contiguous` and
`zigzag` are our rings; `two passes` is a backward that sends keys and values round once for the queries' gradients and
queries round once for those of keys and values, and so computes each pair of blocks twice.

Second table: collectives of the TPU program compiled for `--topology`, the bytes of one layer's keys and values on a
device, and whether a block is computed between the start and the end of each transfer. `--topology ""` leaves it out.
"""

import argparse
import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from haliax_kernels import AttentionMask, flash_attention
from haliax_kernels.attention import xla
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.collectives import shift
from haliax_kernels.compiled.collectives import transfers
from haliax_kernels.compiled.program import Program
from haliax_kernels.context.ring import Ring
from haliax_kernels.testing import topology_mesh

counts: Counter[tuple[str, int]] = Counter()


@dataclass(frozen=True)
class Counting:
    """An implementation that counts the products of queries and keys it computes, by device."""

    mesh_axis: str

    def _count(self, what: str, x: AttentionOperands) -> None:
        size = x.q.shape[1] * x.k.shape[0]

        def add(device: Any) -> None:
            counts[what, int(device)] += size

        jax.debug.callback(add, jax.lax.axis_index(self.mesh_axis))

    def forward(self, options: AttentionOptions, x: AttentionOperands) -> Any:
        self._count("forward", x)
        return xla.forward(options, x)

    def backward(self, options: AttentionOptions, x: AttentionOperands, *rest: Any) -> Any:
        self._count("backward", x)
        return xla.backward(options, x, *rest)


def two_passes(ring: Ring, options: AttentionOptions, x: AttentionOperands, lse: Any, do: Any, delta: Any) -> Any:
    """The backward with every pair computed for the queries, and again for the keys and values."""
    n, axes = ring.shards, ring.mesh_axes
    index, rows = jax.lax.axis_index(axes), x.q.shape[1]
    k, v, dq = x.k, x.v, jnp.zeros(x.q.shape)
    for hop in range(n):
        source = (index - hop) % n
        block = x._replace(k=k, v=v, q_offset=index * rows, k_offset=source * rows)
        share = jax.lax.cond(
            source <= index,
            lambda b=block: ring.base.backward(options, b, lse, do, delta).q,
            lambda: jnp.zeros(x.q.shape),
        )
        dq, k, v = dq + share, shift(k, axes), shift(v, axes)
    visiting, dkv = (x.q, lse, do, delta), (jnp.zeros(x.k.shape), jnp.zeros(x.v.shape))
    for hop in range(n):
        source = (index - hop) % n
        q, *rest = visiting
        block = x._replace(q=q, q_offset=source * rows, k_offset=index * rows)

        def share_of_keys(block: AttentionOperands = block, rest: Any = rest) -> Any:
            found = ring.base.backward(options, block, *rest)
            return found.k, found.v

        share = jax.lax.cond(source >= index, share_of_keys, lambda: jax.tree.map(jnp.zeros_like, (x.k, x.v)))
        dkv = jax.tree.map(jnp.add, dkv, share)
        visiting = jax.tree.map(lambda y: shift(y, axes), visiting)
    return dq, *dkv


def count_pairs(shards: int, layout: str, phase: str) -> dict[int, float]:
    """Blocks that each device computes for a causal mask, in units of one shard of queries by one of keys."""
    rows = 8
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    ring = Ring(Counting("context"), ("context",), shards, zigzag=layout == "zigzag")
    options = AttentionOptions(1.0, right=0)
    q, k = jnp.ones((1, shards * rows, 4)), jnp.ones((shards * rows, 4))

    def run(q: jax.Array, k: jax.Array) -> Any:
        x = AttentionOperands(q, k, k)
        if phase == "forward":
            return ring.forward(options, x)
        args = ring, options, x, q[..., 0], q, q[..., 0]
        return two_passes(*args) if layout == "two passes" else ring.backward(*args[1:])

    specs = PartitionSpec(None, "context"), PartitionSpec("context")
    counts.clear()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("context"), check_vma=False)
    jax.block_until_ready(jax.jit(lambda q, k: jax.tree.map(jnp.sum, mapped(q, k)))(q, k))
    jax.effects_barrier()
    return {device: counts[phase, device] / rows**2 for device in range(shards)}


def critical_path(shards: int, zigzag: bool) -> float:
    """Blocks of the slowest device at each step, added up: what the ring waits for."""
    from haliax_kernels.context.pieces import Pieces, Work

    pieces = Pieces(shards, 8, zigzag)
    seen = Work.of(AttentionOptions(1.0, right=0), pieces, pieces, 0).seen
    return float(seen.sum((2, 3)).max(1).sum()) / pieces.count**2


def tpu_program(topology: str, mode: str, shards: int, length: int) -> dict[str, Any]:
    """What the TPU program of one layer's forward and backward moves, and how it hides it."""
    mesh = topology_mesh(topology, {"context": shards})
    Q, K, H, D = Axis("position", length), Axis("key_position", length), Axis("kv_head", 2), Axis("head_size", 128)

    def abstract(*axes: Axis) -> NamedArray:
        spec = PartitionSpec(*("context" if a in (Q, K) else None for a in axes))
        shape = jax.ShapeDtypeStruct([a.size for a in axes], jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        return NamedArray(shape, axes)

    def both(q: NamedArray, k: NamedArray, v: NamedArray) -> Any:
        def attend(q: NamedArray, k: NamedArray, v: NamedArray) -> NamedArray:
            mask, options = AttentionMask.causal(), {"context_parallel": mode, "implementation": "pallas_tpu"}
            return flash_attention(Q, K, D, q, k, v, mask, **options)

        o, pullback = jax.vjp(attend, q, k, v)
        return pullback(o)

    with jax.set_mesh(mesh), hax.axis_mapping({"position": "context"}):
        text = jax.jit(both).trace(abstract(H, Q, D), abstract(H, K, D), abstract(H, K, D)).lower().compile().as_text()
    found = {
        "mode": mode,
        "shards": shards,
        "program_bytes": len(text),
        "kv_bytes": 2 * length // shards * 2 * 128 * 2,
    }
    moved = list(transfers(Program(text)))
    found["transfers"] = len(moved)
    # A ring's step is a branch of what its block needs.
    found["around_a_block"] = sum(
        any(i.opcode == "conditional" or "tpu_custom_call" in i.text for i in between) for between in moved
    )
    print(
        f"| {mode} | {shards} | {found['program_bytes'] / 1e6:.2f} MB | {found['transfers']} "
        f"| {found['around_a_block']} | {found['kv_bytes'] / 1e6:.2f} MB |",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    rows = []
    print(
        "| shards | layout | blocks the mask needs | forward | backward | critical path |\n|---|---|---|---|---|---|"
    )
    for shards in options.shards:
        for layout in ("contiguous", "zigzag", "two passes"):
            found: dict[str, Any] = {"shards": shards, "layout": layout, "needed": shards * (shards + 1) / 2}
            if layout != "two passes":
                found["forward"] = sum(count_pairs(shards, layout, "forward").values())
                found["critical_path"] = critical_path(shards, layout == "zigzag")
            found["backward"] = sum(count_pairs(shards, layout, "backward").values())
            rows.append(found)
            cells = (found.get(name, "") for name in ("shards", "layout", "needed", "forward", "backward"))
            print(f"| {' | '.join(map(str, cells))} | {found.get('critical_path', '')} |", flush=True)
    compiled = []
    if options.topology:
        print(f"\n{options.topology}, bfloat16, causal, 2 heads of 128, 512 positions on a device")
        print("| mode | shards | program | transfers | around a block | keys and values |\n|---|---|---|---|---|---|")
        for mode in ("ring", "zigzag"):
            compiled += [tpu_program(options.topology, mode, n, n * 512) for n in (4, 8, 16)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "blocks": rows, "programs": compiled}, file, indent=1)


if __name__ == "__main__":
    main()
