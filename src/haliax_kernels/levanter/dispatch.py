# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter's `dot_product_attention` with two more backends: `pallas_flash` and `linear`, our operations."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
from haliax import NamedArray

import haliax_kernels
from haliax_kernels.attention.block_sizes import BlockSizes
from haliax_kernels.errors import UnsupportedOptionError
from haliax_kernels.levanter.config import current_options
from haliax_kernels.levanter.linear_config import causal_segments

logger = logging.getLogger(__name__)

BACKEND_VALUE = "pallas_flash"
LINEAR_VALUE = "linear"

# The arguments of Levanter's function that this module knows the meaning of. Without one of the required ones it
# cannot do its work; an argument beyond these, in a later Levanter, is refused once it is used.
_REQUIRED = frozenset({
    "QPos", "KPos", "Key", "query", "key", "value", "mask", "bias", "attention_dtype", "precision", "use_flash",
    "attn_backend", "flash_block_size", "dropout", "scaling_factor", "logits_soft_cap", "inference", "prng",
})  # fmt: skip
_KNOWN = _REQUIRED | {"attn_sink"}

_DEFAULT_PRECISIONS = (None, "default", jax.lax.Precision.DEFAULT)

_logged: set[str] = set()


def make_dispatcher(original: Callable[..., NamedArray]) -> Callable[..., NamedArray]:
    """Wraps Levanter's `dot_product_attention` so that a call for `pallas_flash` or `linear` comes to this package.

    Every other call goes to `original` with the arguments it came with.

    Raises:
        RuntimeError: If `original` lacks an argument that the backend needs to read.
    """
    signature = inspect.signature(original)
    missing = sorted(_REQUIRED - signature.parameters.keys())
    if missing:
        raise RuntimeError(f"Levanter's dot_product_attention{signature} has no argument {', '.join(missing)}")

    @functools.wraps(original)
    def dot_product_attention(*args: Any, **kwargs: Any) -> NamedArray:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        if call["attn_backend"] == LINEAR_VALUE:
            # No fallback here: a model with another attention is another model.
            _refuse_unknown(signature, call, LINEAR_VALUE)
            return _linear(call)
        if not _is_ours(call["attn_backend"], call["use_flash"]):
            return original(*args, **kwargs)
        try:
            _refuse_unknown(signature, call, BACKEND_VALUE)
            return _flash(call)
        except UnsupportedOptionError as error:
            if current_options().on_unsupported == "error":
                raise
            _log_once(
                logging.WARNING,
                f"{BACKEND_VALUE} falls back to vanilla attention (kernels.on_unsupported: fallback): {error}",
            )
        return original(**{**call, "attn_backend": "vanilla", "use_flash": None})

    return dot_product_attention


def _is_ours(attn_backend: str | None, use_flash: bool | None) -> bool:
    if attn_backend == BACKEND_VALUE:
        if use_flash is False:
            raise ValueError(f"use_flash is False, but attn_backend is {BACKEND_VALUE}, which is not VANILLA")
        return True
    # `use_flash=False` without a backend is how Levanter asks for vanilla, so it is no default to take over.
    is_default = attn_backend == "default" or (attn_backend is None and use_flash is not False)
    return is_default and current_options().default_backend


def _refuse_unknown(signature: inspect.Signature, call: dict[str, Any], backend: str) -> None:
    for name in call.keys() - _KNOWN:
        if call[name] is not signature.parameters[name].default:
            raise UnsupportedOptionError(f"{backend} does not know Levanter's argument {name}={call[name]!r}")


def _flash(call: dict[str, Any]) -> NamedArray:
    """Runs one call, given as Levanter's arguments by name, through `flash_attention`."""
    if hax.axis_name(call["QPos"]) == hax.axis_name(call["KPos"]):
        raise ValueError("QPos and KPos must have different names")
    if call["precision"] not in _DEFAULT_PRECISIONS:
        raise UnsupportedOptionError(f"{BACKEND_VALUE} does not support precision={call['precision']!r}")

    query, key, value = _operands(call)
    options = current_options()
    sink, cap = call.get("attn_sink"), call["logits_soft_cap"]
    if sink is not None and cap is not None:
        sink = hax.tanh(sink / cap) * cap  # Levanter's sink is one more key with a bias, and capped with the others
    out = haliax_kernels.flash_attention(
        call["QPos"],
        call["KPos"],
        call["Key"],
        query,
        key,
        value,
        _as_attention_mask(call["mask"]),
        bias=call["bias"],
        dropout=0.0 if call["inference"] else call["dropout"],
        prng=call["prng"],
        scaling_factor=call["scaling_factor"],
        logits_soft_cap=cap,
        attn_sink=sink,
        context_parallel=options.context_parallel,
        implementation=options.implementation,
        block_sizes=_block_sizes(call["flash_block_size"]),
    )
    return _result(call, BACKEND_VALUE, out, query, key)


def _linear(call: dict[str, Any]) -> NamedArray:
    """Runs one call, given as Levanter's arguments by name, through `linear_attention`."""
    query, key, value = _operands(call)
    Pos, k_pos = query.resolve_axis(hax.axis_name(call["QPos"])), hax.axis_name(call["KPos"])
    used = {
        "bias": call["bias"] is not None,
        "dropout": bool(call["dropout"]) and not call["inference"],
        "logits_soft_cap": call["logits_soft_cap"] is not None,
        "attn_sink": call.get("attn_sink") is not None,
        "scaling_factor, which belongs to a softmax,": call["scaling_factor"] is not None,
        f"precision={call['precision']!r}": call["precision"] not in _DEFAULT_PRECISIONS,
        "use_flash=False": call["use_flash"] is False,
        "queries and keys of different lengths": key.axis_size(k_pos) != Pos.size,
    }
    found = [name for name, there in used.items() if there]
    if found:
        raise UnsupportedOptionError(
            f"attn_backend: {LINEAR_VALUE} has no logits and no softmax; the model asks for {' and '.join(found)}. "
            f"Use {BACKEND_VALUE} for it."
        )
    ids = causal_segments(call["mask"], Pos, f"attn_backend: {LINEAR_VALUE}")
    options = current_options()
    head = query.resolve_axis(hax.axis_name(call["Key"]))
    out = haliax_kernels.linear_attention(
        Pos,
        head,
        query,
        key.rename({k_pos: Pos.name}),
        value.rename({k_pos: Pos.name}),
        feature_map=options.linear_feature_map,
        normalize=options.linear_normalize,
        scaling_factor=1.0 if options.linear_normalize else head.size**-0.5,
        segment_ids=ids,
        implementation=options.implementation,
    )
    return _result(call, LINEAR_VALUE, out, query, key)


def _operands(call: dict[str, Any]) -> tuple[NamedArray, NamedArray, NamedArray]:
    """Query, key and value, in the dtype that the call computes in."""
    query, key, value = call["query"], call["key"], call["value"]
    dtype = call["attention_dtype"]
    return (query, key, value) if dtype is None else (query.astype(dtype), key.astype(dtype), value.astype(dtype))


def _result(call: dict[str, Any], backend: str, out: NamedArray, query: NamedArray, key: NamedArray) -> NamedArray:
    """The output in the query's own dtype, and a line in the log of what computed it."""
    _log_once(logging.INFO, f"{backend} runs attention: query {query.shape}, key {key.shape}, {query.dtype}")
    return out.astype(call["query"].dtype)


def _as_attention_mask(mask: Any) -> Any:
    if not isinstance(mask, NamedArray):
        return mask
    from levanter.layers.attention import AttentionMask

    return AttentionMask(explicit_mask=mask)


def _block_sizes(flash_block_size: int | None) -> BlockSizes | None:
    options = current_options()
    q = options.block_q or flash_block_size or options.block_k
    k = options.block_k or flash_block_size or options.block_q
    return None if q is None or k is None else BlockSizes(q=q, k=k)


def _log_once(level: int, message: str) -> None:
    """Logs what a trace found out; a model traces the same attention many times."""
    if message not in _logged:
        _logged.add(message)
        logger.log(level, message)
