# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compiles attention for a TPU and prints, a JSON line a case, what its kernels cost.

A process of its own: the compiler is told where to write its schedules before it is loaded.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from haliax_kernels import AttentionMask, flash_attention
from haliax_kernels.compiled.kernels import compiled_kernels
from haliax_kernels.compiled.program import Program
from haliax_kernels.compiled.schedules import dump_schedules, read_schedules
from haliax_kernels.compiled.topologies import topology_mesh

DUMP = Path(tempfile.mkdtemp())
SEEN: set[str] = set()


def attention(
    length: int, heads: int, mask: AttentionMask | None, layers: int = 1, gradient: bool = False
) -> dict[str, list]:
    """Its kernels, where the layers run in a scan: name, runs, cycles, whether exact.

    Without a mask it is causal, from an offset that is an argument of the program.
    """
    H, Q, K, D = Axis("heads", heads), Axis("position", length), Axis("key_position", length), Axis("head_size", 128)

    def run(q, k, v, *offset):
        seen = mask or AttentionMask.causal(offset=hax.named(offset[0], ()))

        def layer(q, _):
            return flash_attention(Q, K, D, q, k, v, seen, implementation="pallas_tpu").rearrange(q.axes), None

        return jax.lax.scan(layer, q, None, length=layers)[0].array

    def both(q, k, v):
        o, pullback = jax.vjp(run, q, k, v)
        return pullback(o)

    mesh = topology_mesh("v5e:2x2", {"x": 1})
    everywhere = NamedSharding(mesh, PartitionSpec())
    array = jax.ShapeDtypeStruct((heads, length, 128), jnp.bfloat16, sharding=everywhere)
    shapes: list = [NamedArray(array, (H, P, D)) for P in (Q, K, K)]
    if mask is None:
        shapes.append(jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere))
    with jax.set_mesh(mesh), hax.axis_mapping({}):
        text = jax.jit(both if gradient else run).trace(*shapes).lower().compile().as_text()
    found = compiled_kernels(Program(text), read_schedules(DUMP, SEEN))
    return {"kernels": [[k.name, k.runs, k.cycles, k.exact] for k in found]}


def main() -> None:
    dump_schedules(DUMP)
    cases = {
        "causal 2048": lambda: attention(2048, 2, AttentionMask.causal()),
        "causal 4096": lambda: attention(4096, 2, AttentionMask.causal()),
        "full 2048": lambda: attention(2048, 2, AttentionMask()),
        "4 heads": lambda: attention(2048, 4, AttentionMask.causal()),
        "5 layers": lambda: attention(2048, 2, AttentionMask.causal(), layers=5),
        "gradient 8192": lambda: attention(8192, 2, AttentionMask.causal(), gradient=True),
        "an offset": lambda: attention(2048, 2, None),
    }
    for name, case in cases.items():
        print(json.dumps({"case": name, **case()}), flush=True)


if __name__ == "__main__":
    main()
