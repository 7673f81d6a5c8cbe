# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The example that tells the linear attention story: its kernel's numerics, its output, and its TPU program."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "linear_attention_thread.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("linear_attention_thread", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*args, **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, *args], env={**inherited, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("positions", "key_size", "value_size"), [(128, 8, 8), (384, 16, 8), (256, 8, 40)])
def test_kernel_against_a_float64_recurrence(example, positions, key_size, value_size):
    errors = example.one_device_errors(positions, key_size, value_size, seed=positions)
    assert set(errors) == set("oqkv")
    assert max(errors.values()) < 2e-6, errors


def test_kernel_with_very_negative_features(example):
    """elu(x) + 1 by subtraction would be 0 here, and the epsilon all that is left."""
    import jax.numpy as jnp
    import numpy as np

    q = jnp.full((128, 8), -10.0)
    v = jnp.tile(jnp.arange(1.0, 9.0), (128, 1))
    out = example.linear_attention(jnp.zeros_like(q), q, v, True)
    norm = 8 * np.exp(-10.0) * np.arange(1, 129)[:, None]
    np.testing.assert_allclose(out, v * norm / (norm + example.EPSILON), rtol=1e-5)


def test_kernel_refuses_a_partial_tile(example):
    with pytest.raises(ValueError, match="multiple of 128, got 100"):
        example.one_device_errors(100, 8, 8)


def test_the_story():
    told = run_python(str(EXAMPLE))
    parts = told.split("\n\n")
    assert [part.lstrip()[:2] for part in parts if part.lstrip()[1:2] == "."] == ["1.", "2.", "3.", "4."], told
    assert "Mosaic kernels cannot be automatically partitioned" in told
    assert "batch 4, heads 2, position 256, value 24" in told
    assert "lowered for TPU: 1 kernel forward, 3 in the gradient" in told
    refusal = told[told.index("ShardedAxisError") :]
    assert "attend" in refusal and "position" in refusal and "model" in refusal


COMPILE = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("linear_attention_thread", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
import haliax as hax, jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = np.array(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
Batch, Heads, Pos = hax.Axis("batch", 4), hax.Axis("heads", 2), hax.Axis("position", 256)
Key, Value = hax.Axis("key", 64), hax.Axis("value", 128)
axes = [(Batch, Heads, Pos, Key), (Batch, Heads, Pos, Key), (Batch, Heads, Pos, Value)]

def arrays(mesh, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return [jax.ShapeDtypeStruct([a.size for a in ax], jnp.bfloat16, sharding=sharding) for ax in axes]

def report(fn, *args):
    text = jax.jit(fn).trace(*args).lower().compile().as_text()
    return [text.count("tpu_custom_call"), sum(text.count(f" {c}(") + text.count(f" {c}-start(") for c in COLLECTIVES)]

def gradient(fn):
    return jax.grad(lambda *x: jnp.sum(fn(*x).astype(jnp.float32) ** 2), argnums=(0, 1, 2))

bare = jax.vmap(jax.vmap(example.linear_attention))
wrapped = lambda *x: example.attend(*map(hax.NamedArray, x, axes)).array
one, four = Mesh(devices[:1], ("data",)), Mesh(devices.reshape(2, 2), ("data", "model"))
found = {"one device": report(gradient(bare), *arrays(one))}
sharded = arrays(four, "data", "model")
try:
    report(bare, *sharded)
except NotImplementedError as error:
    found["bare"] = str(error)
with jax.set_mesh(four), hax.axis_mapping({"batch": "data", "heads": "model"}):
    found["wrapped"] = report(wrapped, *sharded)
    found["wrapped gradient"] = report(gradient(wrapped), *sharded)
print(json.dumps(found))
"""


@pytest.mark.tpu_compile
def test_compiles_for_tpu():
    pytest.importorskip("libtpu")
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    found = json.loads(run_python("-c", COMPILE, str(EXAMPLE), **environment).splitlines()[-1])
    assert "Mosaic kernels cannot be automatically partitioned" in found.pop("bare")
    # [kernels, collectives]
    assert found == {"one device": [3, 0], "wrapped": [1, 0], "wrapped gradient": [3, 0]}
