# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Each mistake gives its own error while planning; it names axis, argument, mesh axis, origin and remedy."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from haliax_kernels import Gather, Parallel, Sum, named_kernel
from haliax_kernels.errors import (
    ArgumentError,
    AxisSizeError,
    BindingError,
    InconsistentShardingError,
    ManualAxisError,
    MeshAxisConflictError,
    MissingShardingError,
    MultipleOfError,
    NamedKernelError,
    OutputError,
    PolicyError,
    ShardedAxisError,
    TransformError,
    UnevenShardingError,
    UnknownMeshAxisError,
)
from support import ATTENTION, BOTH_MESHES, make_mesh

B, Pos, KPos, D = Axis("batch", 4), Axis("position", 8), Axis("key_position", 8), Axis("head_size", 16)
AXES = {"q_pos": "position", "k_pos": "key_position", "key": "head_size", "value": "head_size"}
Q, K, V = (hax.ones((B, p, D)) for p in (Pos, KPos, KPos))


def untouchable(*args):
    raise AssertionError("the kernel was traced although the call should have been refused")


def untouchable_attention(q, k, v):
    untouchable()


attend = named_kernel(ATTENTION, policies={"q_pos": Parallel()}, name="attend")(untouchable_attention)


def mentions(error: pytest.ExceptionInfo, *texts: str) -> None:
    missing = [t for t in texts if t not in str(error.value)]
    assert not missing, f"{missing} not in:\n{error.value}"


def refused(kind: type[NamedKernelError], *texts: str, kernel=None, args=(Q, K, V), **kwargs) -> None:
    kernel = kernel or attend.bind(**AXES)
    with pytest.raises(kind) as e:
        kernel(*args, **kwargs)
    mentions(e, *texts)
    plan = kernel.plan(*args, **kwargs)
    assert type(plan.refusals[0]) is kind
    assert str(plan.refusals[0]) in str(e.value)
    assert kind.__name__ in str(plan)


SHARDED = ("'key_position'", "its 'k_pos'", "argument 'k'", "mesh axis 'context' (4 devices)", "Gather()", "None}")


@pytest.mark.parametrize("types", BOTH_MESHES)
def test_local_axis_from_argument(types):
    with jax.set_mesh(make_mesh(types, data=2, context=4)):
        refused(ShardedAxisError, *SHARDED, "axis_mapping= argument", axis_mapping={"key_position": "context"})


def test_local_axis_from_context():
    with jax.set_mesh(make_mesh(data=2, context=4)), hax.axis_mapping({"key_position": "context"}):
        refused(ShardedAxisError, *SHARDED, "from the current hax.axis_mapping")


def test_local_axis_under_jit():
    mapping = {"key_position": "context"}
    with jax.set_mesh(make_mesh(data=2, context=4)), hax.axis_mapping(mapping), pytest.raises(ShardedAxisError) as e:
        hax.named_jit(attend.bind(**AXES))(Q, K, V)
    mentions(e, *SHARDED, "hax.axis_mapping")


def test_local_axis_from_explicit_type():
    with jax.set_mesh(make_mesh(AxisType.Explicit, data=2, context=4)):
        k = hax.shard(K, {"key_position": "context"})
        refused(ShardedAxisError, *SHARDED, "own type on the Explicit mesh", args=(Q, k, V))
        with pytest.raises(ShardedAxisError):
            jax.jit(attend.bind(**AXES))(Q, k, V)


def test_local_axis_from_concrete_array():
    mesh = make_mesh(data=2, context=4)
    k = hax.named(jax.device_put(K.array, NamedSharding(mesh, PartitionSpec(None, "context"))), K.axes)
    refused(ShardedAxisError, *SHARDED, "the array's own NamedSharding", args=(Q, k, V))
    with pytest.raises(ShardedAxisError):  # eager grad hides the array in a tracer
        jax.grad(lambda k: attend.bind(**AXES)(Q, k, V).sum().scalar())(k)


def test_local_axis_already_manual():
    mesh = make_mesh(data=2, context=4)

    def body(q, k, v):
        q, k, v = (hax.named(x, (B, p, D)) for x, p in ((q, Pos), (k, KPos.resize(2)), (v, KPos.resize(2))))
        return attend.bind(**AXES)(q, k, v, axis_mapping={"key_position": "context"}).array

    spec = PartitionSpec(None, "context")
    f = jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec(), spec, spec), out_specs=PartitionSpec(), check_vma=False
    )
    with pytest.raises(ManualAxisError) as e:
        f(Q.array, K.array, V.array)
    mentions(
        e, "'key_position'", "argument 'k'", "'context'", "4 devices", "axis_mapping= argument", "manual", "None}"
    )


@pytest.mark.parametrize("policy", [Gather(), Sum()])
def test_communicating_policy_on_a_manual_axis(policy):
    kernel = named_kernel("k -> ()", policies={"k": policy}, name="total")(untouchable)
    f = jax.shard_map(
        lambda x: kernel(x, axis_mapping={"k": "context"}),
        mesh=make_mesh(context=4),
        in_specs=PartitionSpec("context"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(ManualAxisError) as e:
        f(jnp.ones(8))
    mentions(e, "'k'", "'context'", "manual")


def test_uneven():
    with jax.set_mesh(make_mesh(data=3)):
        refused(
            UnevenShardingError,
            *("'batch'", "argument 'q'", "size 4", "'data' (3 devices)", "axis_mapping= argument", 'Axis("batch", 6)'),
            axis_mapping={"batch": "data"},
        )


def test_mesh_axis_twice_in_one_array():
    with jax.set_mesh(make_mesh(data=2)):
        refused(
            MeshAxisConflictError,
            *("'batch'", "'position'", "argument 'q'", "'data'", "axis_mapping= argument", "None}"),
            axis_mapping={"batch": "data", "position": "data"},
        )


def test_mesh_axis_for_axes_of_two_arrays():
    """Each device would hold one block of a and one of b, and the output only their diagonal pairs."""
    kernel = named_kernel("d, d -> d", name="add")(untouchable)
    x, w = hax.ones((Axis("a", 4), D)), hax.ones((Axis("b", 4), D))
    with jax.set_mesh(make_mesh(data=2)):
        refused(
            MeshAxisConflictError,
            *("'a'", "'b'", "'data'", "None}", "argument 'args[0]'", "argument 'args[1]'"),
            kernel=kernel.bind(d="head_size"),
            args=(x, w),
            axis_mapping={"a": "data", "b": "data"},
        )


def test_sum_over_a_mesh_axis_that_shards_the_batch():
    """psum over 'data' would add up different batches."""
    kernel = named_kernel("(), k -> ()", policies={"k": Sum()}, name="dot")(untouchable)
    with jax.set_mesh(make_mesh(data=2)):
        refused(
            MeshAxisConflictError,
            *("'batch'", "'k'", "'data'"),
            kernel=kernel,
            args=(hax.ones(B), hax.ones(Axis("k", 4))),
            axis_mapping={"batch": "data", "k": "data"},
        )


def test_unknown_mesh_axis():
    with jax.set_mesh(make_mesh(data=2, model=2)):
        refused(
            UnknownMeshAxisError,
            *("'batch'", "argument 'q'", "'modle'", "axis_mapping= argument", "data 2, model 2", '"batch": "model"'),
            axis_mapping={"batch": "modle"},
        )


def test_missing_axis():
    refused(BindingError, "'q'", "'q_pos'", "position 8", "axes=", kernel=attend)


def test_doubled_axis():
    refused(
        BindingError,
        *("'q_pos'", "'key'", "'position'", "argument 'q'"),
        kernel=attend.bind(**{**AXES, "key": "position"}),
    )


def test_output_axis_doubled():
    kernel = named_kernel("a, b -> a b", name="outer")(untouchable).bind(a="head_size", b="head_size")
    refused(BindingError, "output 0", "'head_size'", "twice", kernel=kernel, args=(hax.ones(D), hax.ones(D)))


def test_core_axis_that_is_a_loop_axis_elsewhere():
    kernel = named_kernel("d, n d -> d", name="mix")(untouchable)
    x = hax.ones((Axis("n", 4), Axis("d", 2)))
    refused(BindingError, "'n'", "argument 'args[0]'", "loop axis", "rename", kernel=kernel, args=(x, x))


def test_two_sizes():
    k = hax.ones((B, KPos.resize(4), D))
    refused(AxisSizeError, "'key_position'", "4", "8", "'k'", "'v'", args=(Q, k, V))
    refused(AxisSizeError, "'batch'", "4", "2", args=(Q, hax.ones((B.resize(2), KPos, D)), V))
    refused(AxisSizeError, "'position'", "8", "16", axes={"q_pos": Pos.resize(16)})


def test_multiple_of_holds_locally():
    kernel = named_kernel(ATTENTION, policies={"q_pos": Parallel()}, multiple_of={"q_pos": 4}, name="attend")(
        untouchable_attention
    )
    with jax.set_mesh(make_mesh(context=4)):
        refused(
            MultipleOfError,
            *(
                "'q_pos'",
                "'position'",
                "argument 'q'",
                "multiple of 4",
                "has 2",
                "8 over mesh axis 'context' (4 devices)",
            ),
            *("axis_mapping= argument", 'Axis("position", 16)', "None}"),
            kernel=kernel.bind(**AXES),
            axis_mapping={"position": "context"},
        )


def test_no_sharding_information_under_jit():
    with jax.set_mesh(make_mesh(data=2, model=2)), pytest.raises(MissingShardingError) as e:
        jax.jit(attend.bind(**AXES))(Q, K, V)
    mentions(e, "'q'", "data 2, model 2", "jax.set_mesh", "axis_mapping={}", "haliax.axis_mapping")


def test_no_sharding_information_on_a_mixed_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), pytest.raises(MissingShardingError):
        jax.jit(attend.bind(**AXES))(Q, K, V)


def test_inconsistent_shardings():
    mesh = make_mesh(data=2, model=2)
    q, k = (
        hax.named(jax.device_put(x.array, NamedSharding(mesh, PartitionSpec(axis))), x.axes)
        for x, axis in ((Q, "data"), (K, "model"))
    )
    refused(InconsistentShardingError, "'batch'", "'data'", "'model'", "'q'", "'k'", args=(q, k, V))


def test_plain_array_of_another_rank():
    refused(ArgumentError, "'q'", "(4, 8, 16)", "2 core axes", "haliax.named", args=(Q.array, K, V))


def test_sharded_plain_array_without_a_place():
    kernel = named_kernel("d -> d", name="scale")(lambda x, table: untouchable())
    mesh = make_mesh(data=2)
    table = jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("data")))
    refused(ShardedAxisError, "'table'", "'data'", "haliax.named", kernel=kernel.bind(d="head_size"), args=(V, table))


def test_raw_key_under_sharding():
    kernel = named_kernel("d -> d", name="drop")(lambda x, key: untouchable())
    with jax.set_mesh(make_mesh(data=2)):
        refused(
            ArgumentError,
            *("'key'", "raw PRNG key", "wrap_key_data", 'rng="replicated"'),
            kernel=kernel.bind(d="head_size"),
            args=(V, jax.random.PRNGKey(0)),
            axis_mapping={"batch": "data"},
        )


def test_unhashable_static():
    kernel = named_kernel("d -> d", name="scale")(lambda x, options: untouchable())
    with pytest.raises(ArgumentError, match="'options"):
        kernel(hax.ones(Axis("d", 4)), bytearray(b"x"))


def test_unknown_core_axis_in_axes():
    with pytest.raises(BindingError, match="did you mean 'q_pos'"):
        attend.bind(qpos="position")


@pytest.mark.parametrize(
    ("signature", "policies", "text"),
    [
        ("a, b -> a", {"b": Parallel()}, "'b'"),
        ("a -> a", {"a": Sum()}, "'a'"),
        ("a -> a c", {"c": Gather()}, "'c'"),
        ("a -> a", {"d": Gather()}, "'d'"),
        ("a -> a", {"a": Parallel}, "Parallel()"),
    ],
)
def test_policies_that_cannot_be(signature, policies, text):
    with pytest.raises(PolicyError) as e:
        named_kernel(signature, policies=policies, name="f")(lambda *a: a)
    mentions(e, "'f'", text)


def test_too_many_outputs():
    with pytest.raises(
        OutputError, match=r"returned 2 outputs, but .* has 3\. Return as many, or write what it returns"
    ):
        named_kernel("d -> d, d, d", name="f")(lambda x: (x, x)).bind(d="head_size")(V)


def test_wrong_outputs():
    x = hax.ones((B, D))
    for fn, text in [
        (lambda x: (x, x), "tuple"),
        (lambda x: x[None], "(1, 16)"),
        (lambda x: x[None], "or write the axes that it returns behind the '->'"),
        (lambda x: x[:4], "size 4"),
        (lambda x: x[:4], "a size of its own needs an axis of its own behind the '->', one that no argument has"),
        (lambda x: np.ones(16), "ndarray"),
    ]:
        with pytest.raises(OutputError) as e:
            named_kernel("d -> d", name="f")(fn).bind(d="head_size")(x)
        mentions(e, "'f'", text)


def test_closed_over_tracer():
    def f(scale):
        return named_kernel("d -> d", name="scaled")(lambda x: x * scale).bind(d="head_size")(V).sum().scalar()

    with pytest.raises(TransformError, match="'scale'"):
        jax.grad(f)(2.0)


def test_module_that_holds_a_tracer():
    class Scale(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return x * self.scale

    def f(scale):
        return named_kernel("d -> d", name="scaled")(Scale(scale)).bind(d="head_size")(V).sum().scalar()

    with pytest.raises(TransformError, match="a field of it"):
        jax.grad(f)(2.0)
    assert f(jnp.float32(2.0)) == 2.0 * V.array.size


def test_forward_mode():
    kernel = named_kernel("d -> d", name="sine")(jnp.sin).bind(d="head_size")
    with (
        jax.set_mesh(make_mesh(data=2)),
        hax.axis_mapping({"batch": "data"}),
        pytest.raises(TransformError, match="'sine'"),
    ):
        jax.jvp(lambda v: kernel(v).array, (V,), (V,))


def test_kernel_without_backward():
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (_ for _ in ()).throw(NotImplementedError("no backward")), lambda *_: None)
    kernel = named_kernel("d -> d", name="oneway")(f).bind(d="head_size")
    with jax.set_mesh(make_mesh(data=2)), hax.axis_mapping({"batch": "data"}):
        kernel(V)
        with pytest.raises(TransformError, match="'oneway' runs, but cannot be differentiated"):
            jax.grad(lambda v: kernel(v).sum().scalar())(V)


def test_all_refusals_are_told_at_once():
    with jax.set_mesh(make_mesh(data=2, context=4)):
        plan = attend.bind(**AXES).plan(Q, K, V, axis_mapping={"key_position": "context", "head_size": "data"})
        assert {type(e) for e in plan.refusals} == {ShardedAxisError}
        assert len(plan.refusals) == 5  # head_size in q, k and v; key_position in k and v
