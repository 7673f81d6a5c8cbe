# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""JAX's paged attention and ragged paged attention (inference only: neither has a backward)."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as library_paged
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as library_ragged

from gallery._check import check_kernel
from gallery._support import V5E, needs_libtpu, normal
from haliax_kernels import Parallel, named_kernel

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
    out = library_paged(
        flat, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=pages_per_compute_block
    )
    return out.reshape(q.shape)


def attend(q, k, v, visible):
    """(tokens, kv_heads, group, d) queries on (positions, kv_heads, d) keys, (tokens, positions) mask."""
    logits = jnp.where(visible[:, None, None], jnp.einsum("tkgd,pkd->tkgp", q, k, precision="highest"), -1e30)
    return jnp.einsum("tkgp,pkd->tkgd", jax.nn.softmax(logits, axis=-1), v, precision="highest")


def paged_reference(q, k_pages, v_pages, lengths, page_indices):
    def one(q, length, pages):
        k, v = (
            jnp.moveaxis(x.array[:, pages].reshape(KHeads.size, -1, Head.size), 0, 1) for x in (k_pages, v_pages)
        )
        return attend(q[None], k, v, jnp.arange(k.shape[0])[None] < length)[0]

    return jax.vmap(one)(q.array, lengths.array, page_indices.array)


def paged_arguments():
    rng = np.random.default_rng(0)
    pages = hax.named(jnp.array(rng.permutation(Pages.size).reshape(4, 2), jnp.int32), (Seq, PerSeq))
    lengths = hax.named(jnp.array([32, 5, 17, 1], jnp.int32), Seq)
    caches = normal(1, KHeads, Pages, Page, Head), normal(2, KHeads, Pages, Page, Head)
    return normal(0, Seq, KHeads, Group, Head) * Head.size**-0.5, *caches, lengths, pages


def test_paged_values():
    check_kernel(paged_attention, *paged_arguments(), reference=paged_reference, gradients=False, samples=3)


@needs_libtpu
def test_paged_compiles_for_tpu():
    check_kernel(paged_attention, *paged_arguments(), topology=V5E, gradients=False, samples=4)


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


QUERIES, CACHED = (1, 10, 3), (20, 10, 32)  # the first sequence decodes, the second is a prompt, the third both


def ragged_reference(q, kv_pages, kv_lengths, page_indices, cu_q_lengths, num_seqs):
    out, start = jnp.zeros_like(q.array), 0
    for i, (queries, cached) in enumerate(zip(QUERIES, CACHED, strict=True)):
        cache = kv_pages.array[page_indices.array[i]].reshape(-1, KHeads.size, KV.size, Head.size)
        place = cached - queries + jnp.arange(queries)
        visible = jnp.arange(cache.shape[0])[None] <= place[:, None]
        rows = slice(start, start + queries)
        out = out.at[rows].set(attend(q.array[rows], cache[:, :, 0], cache[:, :, 1], visible))
        start += queries
    return out


def ragged_arguments():
    _, _, _, _, pages = paged_arguments()
    lengths = hax.named(jnp.array([*CACHED, 0], jnp.int32), Seq)
    offsets = hax.named(jnp.array([0, 1, 11, 14, 14], jnp.int32), Offset)
    cache = normal(1, Pages, Page, KHeads, KV, Head)
    q = normal(0, Token, KHeads, Group, Head) * Head.size**-0.5
    return q, cache, lengths, pages, offsets, hax.named(jnp.array([3], jnp.int32), One)


def test_ragged_paged_values():
    # Rows past the last sequence are left unwritten by the kernel.
    check_kernel(ragged_paged_attention, *ragged_arguments(), reference=ragged_reference, gradients=False, samples=2)


@needs_libtpu
def test_ragged_paged_compiles_for_tpu():
    check_kernel(ragged_paged_attention, *ragged_arguments(), topology=V5E, gradients=False, samples=4)
