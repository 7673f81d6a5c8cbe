# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Compile splash attention and its gradient for a TPU v5e, without one.

Run in a process of its own: libtpu reads its environment once.

Usage: python _compile_splash_for_tpu.py; prints one line per case and exits with 1 if any did not compile.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_kernels.attention.splash import attention

BATCH, HEADS, GROUP = 2, 2, 2
# name: (q_len, k_len, key size, value size, dtype, causal, segment ids)
CASES = {
    "segments_bfloat16": (1024, 1024, 128, 128, jnp.bfloat16, True, True),
    "ragged_float32_small_head": (200, 200, 64, 64, jnp.float32, True, False),
    "cross_other_value_size": (256, 100, 64, 128, jnp.bfloat16, False, True),
}


def compile_case(sharding, q_len, k_len, key_size, value_size, dtype, causal, segmented):
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(q, k, v, q_segment_ids, k_segment_ids):
        def one_head(q, k, v, q_ids, k_ids):
            return attention(q, k, v, q_ids, k_ids, causal=causal, scale=key_size**-0.5)

        per_head = jax.vmap(one_head, (0, 0, 0, None, None))
        per_batch = jax.vmap(per_head, (0, 0, 0, 0, 0) if segmented else (0, 0, 0, None, None))
        return per_batch(q, k, v, q_segment_ids, k_segment_ids).astype(jnp.float32).sum()

    arguments = (
        array((BATCH, HEADS, GROUP, q_len, key_size), dtype),
        array((BATCH, HEADS, k_len, key_size), dtype),
        array((BATCH, HEADS, k_len, value_size), dtype),
        array((BATCH, q_len), jnp.int32) if segmented else None,
        array((BATCH, k_len), jnp.int32) if segmented else None,
    )
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arguments).lower().compile()
    return compiled.as_text().count('custom_call_target="tpu_custom_call"')


def main() -> int:
    devices = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu").devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())
    failures = 0
    for name, case in CASES.items():
        try:
            kernels = compile_case(sharding, *case)
        except Exception as error:
            failures += 1
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:500]}")
        else:
            # forward, dq, dk and dv
            failures += kernels != 3
            print(f"{name}: {kernels} kernels")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
