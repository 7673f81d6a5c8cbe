# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Everything that Levanter's `dot_product_attention` may be asked for, by our backend: the numbers of `vanilla`."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

pytestmark = pytest.mark.levanter

B, H, G = Axis("batch", 2), Axis("kv_head", 2), Axis("q_heads_per_group", 2)
Pos, KPos, D, Dv = Axis("position", 16), Axis("key_position", 16), Axis("head_size", 8), Axis("value_size", 6)


def normal(seed, *axes):
    return hax.random.normal(jax.random.key(seed), axes)


@pytest.fixture
def levanter(registered):
    from levanter.layers import attention

    return attention


def masks(attention):
    ids = hax.named(jnp.array([[0] * 7 + [1] * 9, [2] * 16]), (B, Pos))
    causal = attention.AttentionMask.causal
    found = {
        "none": None,
        "causal": causal(),
        "causal offset": causal(offset=3),
        "negative causal offset, first rows see nothing": causal(offset=-2),
        "array": normal(5, Pos, KPos) > -0.5,
        "array with heads": normal(5, B, H, Pos, KPos) > -0.5,
        "array with groups": normal(5, G, Pos, KPos) > -0.5,
        "array of keys": normal(5, B, KPos) > -1,
        "explicit and causal": causal() & attention.AttentionMask.explicit(normal(5, Pos, KPos) > -0.5),
        "sliding window": causal(sliding_window=5),
        "sliding window without causal": attention.AttentionMask(is_causal=False, sliding_window=5),
        "segments": causal().with_segment_ids(ids),
    }
    if "bidirectional_window" in {f.name for f in dataclasses.fields(attention.AttentionMask)}:
        found["bidirectional"] = attention.AttentionMask(is_causal=False, bidirectional_window=3)
    return found


NAMES = (
    "none",
    "causal",
    "causal offset",
    "negative causal offset, first rows see nothing",
    "array",
    "array with heads",
    "array with groups",
    "array of keys",
    "explicit and causal",
    "sliding window",
    "sliding window without causal",
    "segments",
    "bidirectional",
)
OPTIONS = {
    "plain": {},
    "bias": {"bias": normal(6, H, Pos, KPos)},
    "bias of the groups": {"bias": normal(6, G, KPos)},
    "soft cap": {"logits_soft_cap": 1.5},
    "soft cap and bias": {"logits_soft_cap": 1.5, "bias": normal(6, Pos, KPos)},
    "sink": {"attn_sink": normal(7, H, G)},
    "sink of the heads": {"attn_sink": normal(7, H)},
    "sink and soft cap": {"attn_sink": normal(7, H, G), "logits_soft_cap": 1.5},
    "scale": {"scaling_factor": 0.7},
    "attention dtype": {"attention_dtype": jnp.float32},
}


@pytest.mark.parametrize(
    ("mask", "option"),
    [(name, "plain") for name in NAMES] + [("causal", name) for name in OPTIONS] + [("segments", "sink")],
)
def test_as_vanilla(levanter, mask, option):
    found = masks(levanter)
    if mask not in found:
        pytest.skip("this Levanter has no such mask")
    arrays = {"q": normal(0, B, H, G, Pos, D), "k": normal(1, B, H, KPos, D), "v": normal(2, B, H, KPos, Dv)}
    arrays["options"] = {k: v for k, v in OPTIONS[option].items() if isinstance(v, hax.NamedArray)}
    others = {k: v for k, v in OPTIONS[option].items() if not isinstance(v, hax.NamedArray)}
    # Where a query sees nothing, vanilla takes the mean of all values: those rows are left out.
    first = 2 if mask.startswith("negative") else 0

    def loss(arrays, backend):
        out = levanter.dot_product_attention(
            "position",
            "key_position",
            "head_size",
            arrays["q"],
            arrays["k"],
            arrays["v"],
            found[mask],
            attn_backend=backend,
            **others,
            **arrays["options"],
        )
        out = out.rearrange((B, H, G, Pos, Dv)).array[..., first:, :]
        return jnp.sum(out * jax.random.normal(jax.random.key(9), out.shape)), out

    both = {b: jax.value_and_grad(loss, has_aux=True)(arrays, b) for b in ("pallas_flash", "vanilla")}
    (_, ours), our_grads = both["pallas_flash"]
    (_, theirs), their_grads = both["vanilla"]
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    for a, b in zip(jax.tree.leaves(our_grads), jax.tree.leaves(their_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5)


def dropped(attention, prng, v, **options):
    q, k = hax.zeros((B, H, G, Pos, D)), hax.zeros((B, H, KPos, D))
    return attention.dot_product_attention(
        "position",
        "key_position",
        "head_size",
        q,
        k,
        v,
        attention.AttentionMask.causal(),
        attn_backend="pallas_flash",
        dropout=0.25,
        inference=False,
        prng=prng,
        **options,
    )


def test_dropout(levanter):
    """With equal logits and one-hot values the outputs are the probabilities themselves."""
    v = hax.named(jnp.eye(16), (KPos, Axis("value_size", 16))).broadcast_axis((B, H))
    p = dropped(levanter, jax.random.PRNGKey(0), v).rearrange((B, H, G, Pos, "value_size")).array
    below = np.tril(np.ones((16, 16), bool))
    assert np.all(np.asarray(p)[..., ~below] == 0), "no future token"
    share = np.asarray(p) * np.arange(1, 17)[:, None]
    kept = share[..., below]
    assert np.all(np.isclose(kept, 0) | np.isclose(kept, 1 / 0.75, rtol=1e-5))
    assert abs(np.mean(kept > 0) - 0.75) < 0.03
    assert len({s.tobytes() for s in (share > 0).reshape(-1, 16, 16)}) == 8, "each head drops others"
    again = dropped(levanter, jax.random.PRNGKey(0), v).rearrange((B, H, G, Pos, "value_size")).array
    np.testing.assert_array_equal(p, again)
    other = dropped(levanter, jax.random.PRNGKey(1), v).rearrange((B, H, G, Pos, "value_size")).array
    assert np.any(other != p)


def test_dropout_does_not_depend_on_the_sharding(levanter):
    from support import make_mesh

    v = normal(3, B, H, KPos, Dv)
    whole = dropped(levanter, jax.random.PRNGKey(0), v)
    mapping = {"batch": "data", "kv_head": "model"}
    with jax.set_mesh(make_mesh(data=2, model=2)), hax.axis_mapping(mapping):
        sharded = hax.named_jit(lambda v: dropped(levanter, jax.random.PRNGKey(0), v))(v)
    np.testing.assert_allclose(sharded.array, whole.rearrange(sharded.axes).array, rtol=1e-5, atol=1e-6)
