# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`model.type: linear_llama`: Levanter's Llama with linear attention, which decodes token by token from a state.

Importing this module registers the model type with Levanter.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call, shaped_rng_split
from haliax.nn.scan import BlockSeq, ScanCheckpointPolicy, Stacked
from levanter.layers.attention import Attention
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, RotaryEmbeddingsConfig
from levanter.models.llama import (
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaEmbedding,
    LlamaLMHeadModel,
    LlamaTransformer,
)
from levanter.models.lm_model import LmConfig
from levanter.utils.activation import ActivationFunctionEnum

from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.levanter.linear_config import LinearAttentionConfig, causal_segments
from haliax_kernels.linear.call import LinearAttentionState
from haliax_kernels.linear.linear_attention import linear_attention, linear_attention_step

_WHO = "model.type: linear_llama"


@LmConfig.register_subclass("linear_llama")
@dataclass(frozen=True)
class LinearLlamaConfig(LmConfig["LinearLlamaLMHeadModel"]):
    """Levanter's `LlamaConfig`, whose fields mean the same here, with `linear` in place of an attention backend.

    It is no `HFCompatConfig`: Hugging Face has no such model, and Levanter refuses `hf_save_path` for it.

    Attributes:
        linear: the options of the attention.
    """

    max_seq_len: int = 2048
    hidden_dim: int = 4096
    intermediate_dim: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    head_dim: int | None = None
    num_kv_heads: int = 32
    activation_function: ActivationFunctionEnum = ActivationFunctionEnum.silu
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    hybrid_norm: bool = False
    use_qk_norm: bool = False
    input_embedding_norm: bool = False
    gradient_checkpointing: bool | ScanCheckpointPolicy | str = True
    scan_layers: bool = True
    use_bias: bool = False
    use_layer_norm_weight: bool = True
    rope: RotaryEmbeddingsConfig = field(default_factory=DefaultRotaryEmbeddingsConfig)
    linear: LinearAttentionConfig = field(default_factory=LinearAttentionConfig)

    @property
    def llama(self) -> LlamaConfig:
        """The Llama that this one is but for its attention."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "linear"}
        return LlamaConfig(**fields)

    @property
    def Embed(self) -> Axis:
        return self.llama.Embed

    @property
    def model_type(self) -> type[LinearLlamaLMHeadModel]:
        return LinearLlamaLMHeadModel

    def flops_per_token(self, vocab_size: int, context_length: int) -> float:
        """Of a forward pass: those of a Llama of one token, and of every head's state, which each key/value pair
        enters and each query reads."""
        llama, size = self.llama, self.llama.actual_head_size
        states = 2 * size * size * (self.num_heads + self.num_kv_heads) * self.num_layers
        return cast(float, llama.flops_per_token(vocab_size, 1)) + states

    def total_trainable_params(self, vocab_size: int) -> float:
        heads, size = self.num_kv_heads, self.llama.actual_head_size
        gates = {"token": heads, "channel": heads * size}.get(self.linear.decay, 0)
        betas = heads if self.linear.delta_rule else 0
        own = self.num_layers * (gates + betas) * (self.hidden_dim + 1)
        return self.llama.total_trainable_params(vocab_size) + own

    def hf_checkpoint_converter(self, ref_checkpoint: str | None = None) -> NoReturn:
        """Raises: there is nothing to convert to."""
        del ref_checkpoint
        _refuse_hf()

    def to_hf_config(self, vocab_size: int, config_overrides: dict[str, Any] | None = None) -> NoReturn:
        """Raises: there is nothing to convert to."""
        del vocab_size, config_overrides
        _refuse_hf()


def _refuse_hf() -> NoReturn:
    raise UnsupportedOptionError(
        f"{_WHO} has no counterpart among Hugging Face's models, so that it cannot be exported to or initialized from "
        "one. Keep Levanter's own checkpoints (trainer.checkpointer), and drop hf_save_path and initialize_from_hf."
    )


class LinearAttention(Attention):
    """Levanter's `Attention` with linear attention between its projections.

    Attributes:
        options: how it computes.
        gate_proj: from Embed to the logarithm of each token's decay, before a log-sigmoid; None without such a decay.
        beta_proj: from Embed to beta, before a sigmoid; None without the delta rule.
    """

    options: LinearAttentionConfig = eqx.field(static=True, default_factory=LinearAttentionConfig)
    gate_proj: hnn.Linear | None = None
    beta_proj: hnn.Linear | None = None

    @staticmethod
    def init(config: Any, *, key: jax.Array) -> LinearAttention:
        """A fresh one of a `LinearLlamaConfig`."""
        k_base, k_gate, k_beta = jax.random.split(key, 3)
        attention, options = config.llama.attention_config(), config.linear
        base = Attention.init(attention, key=k_base)
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        heads = (attention.KVHeads,)
        outs = {"token": heads, "channel": (*heads, attention.HeadSize)}

        def linear(Out: tuple[Axis, ...], key: jax.Array) -> hnn.Linear:
            return hnn.Linear.init(In=attention.Embed, Out=Out, key=key, use_bias=True, out_first=True)

        gate = linear(outs[options.decay], k_gate) if options.decay in outs else None
        beta = linear(heads, k_beta) if options.delta_rule else None
        return LinearAttention(**fields, options=options, gate_proj=gate, beta_proj=beta)

    @named_call
    def __call__(self, x: NamedArray, mask: Any, *, key: Any = None, pos_ids: NamedArray | None = None) -> NamedArray:
        """{..., position, embed} to the same; `mask` is a causal one of Levanter's."""
        ids = causal_segments(mask, x.resolve_axis("position"), _WHO)
        q, k, v, options = self._project(x, key, pos_ids)
        options |= {"segment_ids": ids, "chunk_size": self.options.chunk_size}
        out = linear_attention("position", "head_size", q, k, v, implementation=self.options.implementation, **options)
        return self._finish(out, x, key)

    def step(
        self, x: NamedArray, state: LinearAttentionState | None, pos_ids: NamedArray
    ) -> tuple[NamedArray, LinearAttentionState]:
        """The attention of one token, {..., position of size 1, embed}, and the state after it."""
        q, k, v, options = self._project(x, None, pos_ids)
        options: dict[str, Any] = {
            n: o["position", 0] if n in ("gate", "beta") and o is not None else o for n, o in options.items()
        }
        q, k, v = (a["position", 0] for a in (q, k, v))
        out, new = linear_attention_step("head_size", q, k, v, state, **options)
        return self._finish(out.broadcast_axis(x.resolve_axis("position")), x, None), new

    def _project(
        self, x: NamedArray, key: Any, pos_ids: NamedArray | None
    ) -> tuple[NamedArray, NamedArray, NamedArray, dict[str, Any]]:
        """Queries, keys, values, and the options of `linear_attention` and its step."""
        q, k, v = self._compute_qkv(x, key=key, pos_ids=pos_ids)
        if self.config.upcast_attn:
            q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        if self.options.delta_rule:
            wide = k.astype(jnp.float32)
            k = (wide * hax.rsqrt(hax.sum(wide * wide, "head_size") + 1e-6)).astype(k.dtype)
        gate = beta = decay = None
        if self.gate_proj is not None:
            gate = hnn.log_sigmoid(self.gate_proj(x).astype(jnp.float32)) / self.options.gate_temperature
        if self.beta_proj is not None:
            beta = hnn.sigmoid(self.beta_proj(x))
        if self.options.decay == "head":
            decay = retention_decays(k.resolve_axis("kv_head"))
        return q, k, v, {
            "feature_map": self.options.feature_map,
            "normalize": self.options.normalize,
            "scaling_factor": 1.0 if self.options.normalize else self.config.head_size**-0.5,
            "decay": decay,
            "gate": gate,
            "beta": beta,
        }  # fmt: skip

    def _finish(self, out: NamedArray, x: NamedArray, key: Any) -> NamedArray:
        out = out.flatten_axes(("kv_head", "q_heads_per_group"), "heads").astype(x.dtype)
        return self.o_proj(out, key=key)

    def paged_decode(self, *args: Any, **kwargs: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raises: there are no keys to keep in pages."""
        _refuse_pages()


def retention_decays(Heads: Axis) -> NamedArray:
    """RetNet's constant decays, 1 - 2^-5 for the first head to 1 - 2^-12 for the last."""
    return hax.named(jnp.asarray(1 - 2.0 ** -np.linspace(5, 12, Heads.size), jnp.float32), Heads)


class LinearLlamaDecoderLayer(LlamaDecoderLayer):
    """Levanter's decoder layer around `LinearAttention`."""

    @staticmethod
    def init(config: Any, *, key: jax.Array) -> LinearLlamaDecoderLayer:
        """A fresh one of a `LinearLlamaConfig`."""
        k_layer, k_attention = jax.random.split(key)
        base = LlamaDecoderLayer.init(config.llama, key=k_layer)
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        attention = LinearAttention.init(config, key=k_attention)
        return LinearLlamaDecoderLayer(**{**fields, "self_attn": attention})

    def step(
        self, x: NamedArray, state: LinearAttentionState | None, pos_ids: NamedArray
    ) -> tuple[NamedArray, LinearAttentionState]:
        """The layer for one token, and the state after it."""
        states: list[LinearAttentionState] = []

        def attend(x: NamedArray, **_: Any) -> NamedArray:
            out, new = cast(LinearAttention, self.self_attn).step(x, state, pos_ids)
            states.append(new)
            return out

        # Levanter's layer calls whatever stands in the attention's place.
        x = LlamaDecoderLayer.__call__(dataclasses.replace(self, self_attn=attend), x, None)
        return x, states[0]

    def decode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises, as `initial_cache` does: there are no keys to keep in pages."""
        _refuse_pages()

    initial_cache = decode  # pyright: ignore[reportAssignmentType]


def _refuse_pages() -> NoReturn:
    raise UnsupportedOptionError(
        f"{_WHO} keeps a state, and no pages of keys and values, so that Levanter's paged decoder cannot run it. "
        "Decode with LinearLlamaLMHeadModel.step."
    )


class LinearLlamaTransformer(LlamaTransformer):
    """Levanter's Llama transformer of `LinearLlamaDecoderLayer`s."""

    @staticmethod
    def init(config: Any, *, key: jax.Array) -> LinearLlamaTransformer:
        """A fresh one of a `LinearLlamaConfig`."""
        llama = config.llama
        kind: Any = Stacked if config.scan_layers else BlockSeq
        layers = kind.init(llama.Layers, LinearLlamaDecoderLayer, gradient_checkpointing=config.gradient_checkpointing)
        layers = layers(config, key=shaped_rng_split(key, config.num_layers))
        return LinearLlamaTransformer(config, layers, cast(Any, llama.mk_LayerNorm(llama.Embed)))

    def step(
        self, x: NamedArray, states: tuple[LinearAttentionState, ...] | None, pos_ids: NamedArray
    ) -> tuple[NamedArray, tuple[LinearAttentionState, ...]]:
        """All layers for one token, and the states after it, one for each layer."""
        new = []
        for i, layer in enumerate(self.layers.unstacked()):
            x, state = cast(LinearLlamaDecoderLayer, layer).step(x, None if states is None else states[i], pos_ids)
            new.append(state)
        return self.norm(x), tuple(new)


class LinearLlamaLMHeadModel(LlamaLMHeadModel):
    """Levanter's Llama with linear attention; see `LinearLlamaConfig`."""

    @classmethod
    def init(cls, Vocab: Axis, config: Any, *, key: jax.Array) -> LinearLlamaLMHeadModel:
        """A fresh one of a `LinearLlamaConfig`."""
        k_transformer, k_embeddings, k_head = jax.random.split(key, 3)
        transformer = LinearLlamaTransformer.init(config, key=k_transformer)
        embeddings = LlamaEmbedding.init(Vocab, config.llama, key=k_embeddings)
        head = None
        if not config.tie_word_embeddings:
            head = hnn.Linear.init(In=config.Embed, Out=Vocab, key=k_head, use_bias=False, out_first=True)
        return LinearLlamaLMHeadModel(transformer, embeddings, head)

    def step(
        self,
        input_ids: NamedArray,
        states: tuple[LinearAttentionState, ...] | None = None,
        *,
        pos_ids: NamedArray | int | jax.Array = 0,
    ) -> tuple[NamedArray, tuple[LinearAttentionState, ...]]:
        """The logits after one more token, for a decoder; those of the parallel form at its position.

        Args:
            input_ids: the next token, {...}: batch axes, or none.
            states: what the tokens before left, one state for each layer; None before the first token.
            pos_ids: its position, for rotary embeddings; a number or {...}.

        Returns:
            `(logits, states)`: {..., vocab}, and the states after the token. Their size does not grow.
        """
        One = Axis("position", 1)
        pos = pos_ids if isinstance(pos_ids, NamedArray) else hax.named(jnp.asarray(pos_ids), ())
        x = self.embeddings.embed(input_ids.broadcast_axis(One))
        x, states = cast(LinearLlamaTransformer, self.transformer).step(x, states, pos.broadcast_axis(One))
        logits = self.embeddings.unembed(x) if self.lm_head is None else self.lm_head(x)
        return logits["position", 0], states

    def initial_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: there are no keys to keep in pages."""
        _refuse_pages()

    def decode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: there are no keys to keep in pages."""
        _refuse_pages()
