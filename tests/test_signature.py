# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

import functools

import jax
import pytest
from jaxtyping import Array, Float, Int

from haliax_kernels import named_kernel
from haliax_kernels.errors import ArgumentError, SignatureError
from haliax_kernels.signature import ArraySpec, parse_signature, signature_from_annotations


def test_parse():
    s = parse_signature("q_pos key, k_pos key,() -> q_pos, ()")
    assert s.inputs == (ArraySpec(("q_pos", "key")), ArraySpec(("k_pos", "key")), ArraySpec(()))
    assert s.outputs == (ArraySpec(("q_pos",)), ArraySpec(()))
    assert s.core_axes == ("q_pos", "key", "k_pos")
    assert s.several


def test_parse_batch():
    s = parse_signature("*b pos, *b -> *b pos")
    assert s.inputs == (ArraySpec(("pos",), "b"), ArraySpec((), "b"))
    assert s.batched


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("#pos -> pos", "#pos"),
        ("?pos -> pos", "?pos"),
        ("_ -> pos", "_"),
        ("4 key -> key", "4"),
        ("pos+1 -> pos", "pos+1"),
        ("pos *b -> pos", "*b"),
        ("... pos -> pos", "..."),
        ("pos=4 -> pos", "pos=4"),
        ("pos -> pos[0]", "pos[0]"),
    ],
)
def test_refused_tokens_are_named(text, token):
    with pytest.raises(SignatureError) as e:
        parse_signature(text, "attend")
    assert repr(token) in str(e.value)
    assert "attend" in str(e.value)


@pytest.mark.parametrize(
    "text", ["pos", "pos -> a -> b", "pos, -> pos", "pos -> ", "pos pos -> pos", "*b pos, pos -> *b pos"]
)
def test_refused_forms(text):
    with pytest.raises(SignatureError):
        parse_signature(text)


def test_annotations_through_wrappers():
    def f(
        q: Float[Array, "pos key"], scale: float, ids: Int[Array, " pos"] | None = None
    ) -> tuple[Float[Array, "pos key"], Float[Array, ""]]:
        raise NotImplementedError

    wanted = "pos key, pos -> pos key, ()"
    assert str(signature_from_annotations(f, "f")) == wanted
    assert signature_from_annotations(f, "f").params == ("q", "ids")
    assert str(signature_from_annotations(jax.jit(f), "f")) == wanted
    assert str(signature_from_annotations(functools.partial(f, scale=1.0), "f")) == wanted
    assert str(signature_from_annotations(jax.custom_vjp(f), "f")) == wanted


def test_annotation_token_refused_when_the_decorator_runs():
    with pytest.raises(SignatureError, match="'#pos'"):

        @named_kernel
        def f(q: Float[Array, "#pos key"]) -> Float[Array, "pos key"]:
            return q


def test_string_wins_over_annotations():
    @named_kernel("a b -> a b")
    def f(q: Float[Array, "pos key"]) -> Float[Array, "pos key"]:
        return q

    assert "a b -> a b" in repr(f)


def test_without_any_signature():
    with pytest.raises(SignatureError, match="no signature"):
        named_kernel(lambda x: x)


def test_reserved_parameter():
    with pytest.raises(SignatureError, match="'axes'"):
        named_kernel("a -> a")(lambda x, axes: x)


def test_too_many_arguments():
    with pytest.raises(ArgumentError, match="2 arguments"):
        named_kernel("a, b -> a")(lambda x: x)
