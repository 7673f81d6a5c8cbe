# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Where `haliax.partitioning.shard_map` and others are silently wrong or lose data: right here, or refused."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import shard_map as haliax_shard_map

from haliax_kernels import Gather, Sum, named_kernel
from haliax_kernels.errors import ShardedAxisError
from support import ATTENTION, BOTH_MESHES, attention, make_mesh

B, Seq = Axis("batch", 4), Axis("seq", 16)
MAPPING = {"seq": "context"}
BODIES = {
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    "cumsum": (lambda x: jnp.cumsum(x, axis=-1), lambda x: np.cumsum(x, axis=-1)),
}


@pytest.fixture(params=BOTH_MESHES, ids=lambda t: t.name)
def mesh(request):
    with jax.set_mesh(make_mesh(request.param, context=4, data=2)), hax.axis_mapping(MAPPING):
        yield


@pytest.mark.parametrize("body", BODIES)
def test_work_along_a_sharded_axis(body, mesh):
    fn, reference = BODIES[body]
    x = hax.random.normal(jax.random.key(0), (B, Seq))
    sharded = hax.shard(x)
    want = reference(np.float64(x.array))
    # The peer is silently wrong: that is what the refusal is for.
    peer = haliax_shard_map(lambda x: hax.named(fn(x.array), ("batch", "seq")))(sharded)
    assert np.abs(np.asarray(peer.array) - want).max() > 0.1
    kernel = named_kernel("seq -> seq", name=body)(fn)
    with pytest.raises(ShardedAxisError):
        kernel(sharded)
    np.testing.assert_allclose(kernel.with_policies(seq=Gather())(sharded).array, want, rtol=1e-5, atol=1e-5)


def test_attention_over_a_sharded_key_axis(mesh):
    attend = named_kernel(ATTENTION)(attention).bind(q_pos="position", k_pos="seq", key="embed", value="embed")
    q, k = (
        hax.random.normal(jax.random.key(i), (B, p, Axis("embed", 8)))
        for i, p in enumerate((Axis("position", 8), Seq))
    )
    with pytest.raises(ShardedAxisError):
        attend(q, hax.shard(k), k)
    want = attend(q, k, k, axis_mapping={})
    got = attend.with_policies(k_pos=Gather())(q, hax.shard(k), k)
    np.testing.assert_allclose(got.array, want.array, rtol=1e-5, atol=1e-6)


def test_mapped_head_size(mesh):
    """Levanter's splash is wrong by 2.1 there."""
    attend = named_kernel(ATTENTION)(attention).bind(
        q_pos="position", k_pos="key_position", key="embed", value="embed"
    )
    axes = [(B, Axis(p, 8), Axis("embed", 8)) for p in ("position", "key_position")]
    q, k = (hax.random.normal(jax.random.key(i), a) for i, a in enumerate(axes))
    with pytest.raises(ShardedAxisError, match="'embed'"):
        attend(q, k, k, axis_mapping={"embed": "context"})


def test_dropped_psum(mesh):
    """A reduction over a sharded axis: refused, or summed where declared additive; never shard 0's number."""
    x = hax.random.normal(jax.random.key(0), (B, Seq))
    total = named_kernel("seq -> ()")(jnp.sum)
    with pytest.raises(ShardedAxisError, match="Sum"):
        total(hax.shard(x))
    got = total.with_policies(seq=Sum())(hax.shard(x))
    np.testing.assert_allclose(got.array, np.float64(x.array).sum(-1), rtol=1e-5, atol=1e-5)


def test_output_axis_under_another_name(mesh):
    """The peer returns half of the data where an output axis is not in the mapping."""
    kernel = named_kernel("seq -> seq", policies={"seq": Gather()})(lambda x: x * 2)
    renamed = named_kernel("a -> b", name="renamed")(lambda x: x * 2)
    x = hax.random.normal(jax.random.key(0), (B, Seq))
    out = kernel(hax.shard(x)).rename({"seq": "position"})
    assert out.axes == (B, Axis("position", 16))
    np.testing.assert_array_equal(out.array, 2 * x.array)
    with pytest.raises(ShardedAxisError):
        renamed(hax.shard(x), axes={"a": "seq", "b": "position"})
    out = renamed.with_policies(a=Gather())(hax.shard(x), axes={"a": "seq", "b": "position"})
    assert out.axes == (B, Axis("position", 16))
    np.testing.assert_array_equal(out.array, 2 * x.array)


def test_static_arguments_and_plain_outputs(mesh):
    kernel = named_kernel("seq -> seq", policies={"seq": Gather()})(lambda x, n, flip: x[::-1] * n if flip else x)
    plain = kernel(jnp.arange(16.0), 3, True)
    np.testing.assert_array_equal(plain, np.arange(16.0)[::-1] * 3)


def test_haliax_random_inside(mesh):
    """`hax.random` inside a kernel: it must not look for the outer axis mapping."""

    @named_kernel("*b -> *b", name="noise")
    def noise(x, key):
        axes = tuple(Axis(f"d{i}", n) for i, n in enumerate(x.shape))
        return x + hax.random.normal(key, axes).array

    out = noise(hax.zeros((B, Seq)), jax.random.key(0), axis_mapping={"batch": "context"})
    assert len(np.unique(np.asarray(out.array))) == 64
