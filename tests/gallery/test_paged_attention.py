# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's paged attention and ragged paged attention (inference only: neither has a backward)."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as library_paged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as library_ragged

from gallery._support import compile_for_tpu, needs_libtpu, normal, plain
from haliax_kernels import Parallel, named_kernel
from haliax_kernels.testing import check_kernel

Seq, KHeads, Group, Head = Axis("seq", 4), Axis("kv_heads", 2), Axis("group", 2), Axis("d", 128)
Pages, Page, PerSeq = Axis("pages", 8), Axis("page", 16), Axis("pages_per_seq", 2)


# Query heads are (kv_heads, group), so that the query heads of a shard are those of its key/value heads.
@named_kernel(
    "seq kv_heads group d, kv_heads pages page d, kv_heads pages page d, seq, seq pages_per_seq"
    " -> seq kv_heads group d",
    policies={"seq": Parallel(), "kv_heads": Parallel(), "group": Parallel()},
)
def paged_attention(q, k_pages, v_pages, lengths, page_indices, *, pages_per_compute_block=2):
    flat = q.reshape(q.shape[0], -1, q.shape[-1])
    out = library_paged(flat, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=pages_per_compute_block)
    return out.reshape(q.shape)


def attend(q, k, v, visible):
    """(tokens, kv_heads, group, d) queries on (positions, kv_heads, d) keys, (tokens, positions) mask."""
    logits = jnp.where(visible[:, None, None], jnp.einsum("tkgd,pkd->tkgp", q, k, precision="highest"), -1e30)
    return jnp.einsum("tkgp,pkd->tkgd", jax.nn.softmax(logits, axis=-1), v, precision="highest")


@plain
def paged_reference(q, k_pages, v_pages, lengths, page_indices):
    def one(q, length, pages):
        k, v = (jnp.moveaxis(x[:, pages].reshape(KHeads.size, -1, Head.size), 0, 1) for x in (k_pages, v_pages))
        return attend(q[None], k, v, jnp.arange(k.shape[0])[None] < length)[0]

    return jax.vmap(one)(q, lengths, page_indices)


def paged_arguments():
    rng = np.random.default_rng(0)
    pages = hax.named(jnp.array(rng.permutation(Pages.size).reshape(4, 2), jnp.int32), (Seq, PerSeq))
    lengths = hax.named(jnp.array([32, 5, 17, 1], jnp.int32), Seq)
    # bfloat16, since the kernel rounds what it reads to that.
    caches = (normal(i, KHeads, Pages, Page, Head).astype(jnp.bfloat16) for i in (1, 2))
    return normal(0, Seq, KHeads, Group, Head) * Head.size**-0.5, *caches, lengths, pages


def test_paged_values():
    check_kernel(paged_attention, *paged_arguments(), reference=paged_reference, gradients=False, mesh={"a": 2})


@needs_libtpu
def test_paged_compiles_for_tpu():
    mapping = {"seq": "a", "kv_heads": "b"}
    compile_for_tpu(paged_attention, *paged_arguments(), mapping=mapping, kernels=0)


Token, KV, Offset, One = Axis("token", 32), Axis("kv", 2), Axis("offset", 5), Axis("one", 1)


# Keys and values are interleaved in the cache, which is why its head axis is (kv_heads, kv).
@named_kernel(
    "token kv_heads group d, pages page kv_heads kv d, seq, seq pages_per_seq, offset, one -> token kv_heads group d",
    policies={"kv_heads": Parallel(), "group": Parallel()},
)
def ragged_paged_attention(q, kv_pages, kv_lengths, page_indices, cu_q_lengths, num_seqs):
    flat, cache = q.reshape(q.shape[0], -1, q.shape[-1]), kv_pages.reshape(*kv_pages.shape[:2], -1, q.shape[-1])
    blocks = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8}
    out = library_ragged(flat, cache, kv_lengths, page_indices, cu_q_lengths, num_seqs, **blocks)
    return out.reshape(q.shape)


def ragged_arguments():
    # The first sequence decodes one token, the second is a prompt, the third adds to what is cached.
    _, _, _, _, pages = paged_arguments()
    lengths = hax.named(jnp.array([20, 10, 32, 0], jnp.int32), Seq)
    offsets = hax.named(jnp.array([0, 1, 11, 14, 14], jnp.int32), Offset)
    cache = normal(1, Pages, Page, KHeads, KV, Head)
    q = normal(0, Token, KHeads, Group, Head) * Head.size**-0.5
    return q, cache, lengths, pages, offsets, hax.named(jnp.array([3], jnp.int32), One)


def test_ragged_paged_is_refused_by_the_interpreter():
    """JAX's interpreter for TPUs knows no reshaped references; so there are no numbers without a TPU."""
    with pltpu.force_tpu_interpret_mode(), pytest.raises(Exception, match="'ReshapeTransform' object has no"):
        jax.block_until_ready(ragged_paged_attention(*ragged_arguments()).array)


@needs_libtpu
def test_ragged_paged_compiles_for_tpu():
    mapping = {"kv_heads": "a"}
    compile_for_tpu(ragged_paged_attention, *ragged_arguments(), mapping=mapping, kernels=0)
