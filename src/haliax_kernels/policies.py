# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""What a kernel tolerates when one of its core axes is sharded."""

from collections.abc import Mapping
from dataclasses import dataclass

from haliax_kernels.errors import PolicyError
from haliax_kernels.signature import KernelSignature


@dataclass(frozen=True)
class Policy:
    """Base of the axis policies; use one of its subclasses."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Local(Policy):
    """The kernel needs the whole axis on every device. The default: a sharded axis is refused (`ShardedAxisError`)."""


@dataclass(frozen=True)
class Parallel(Policy):
    """The kernel treats each index of the axis by itself, so any sharding of it is fine.

    Every output must have the axis. That the kernel really keeps its indices apart cannot be seen from outside: a
    `Parallel` on an axis that the kernel mixes gives wrong numbers.
    """


@dataclass(frozen=True)
class Gather(Policy):
    """The kernel needs the whole axis, and it may be brought together for it.

    Forward, an all-gather before the kernel. Backward, a reduce-scatter of the cotangent where the shards did
    different work, and a local slice where all did the same. An output that has the axis comes back sharded as the
    input was.
    """


@dataclass(frozen=True)
class Sum(Policy):
    """The kernel sums over the axis: each shard sums its part, and outputs that lack the axis are added up (psum).

    The kernel must be additive over the axis: the sum of its outputs on the parts is its output on the whole. Its own
    backward receives the cotangent of the total and returns the gradient of its own shard; it must not psum anything.
    """


@dataclass(frozen=True)
class Halo(Policy):
    """The kernel sees its shard plus some rows (indices of the axis) of the neighbouring shards.

    Every output must have the axis, with the shard's own rows only. The kernel always gets `before + after` more rows
    than that, on one device too, so that it is written once. Forward, each shard receives exactly these rows from its
    neighbours; backward, it returns their cotangents.

    Attributes:
        before: how many rows in front of the shard's own.
        after: how many behind them.
        edge: what the rows beyond the two ends of the whole axis hold.
        aligned_with: a core axis of the same size whose rows lie beside these, as queries lie beside the keys of a
            sliding window. Both are then sharded alike, over the same mesh axes, and an output needs one of the two
            only, by the policy of that axis: `Parallel()`, `Sum()`, `Manual()` or `Halo()`.

    Raises:
        PolicyError: a negative number of rows.
    """

    before: int = 0
    after: int = 0
    edge: float = 0
    aligned_with: str | None = None

    def __post_init__(self) -> None:
        for what in ("before", "after"):
            rows = getattr(self, what)
            if not isinstance(rows, int) or rows < 0:
                raise PolicyError(f"Halo({what}={rows!r}): give the number of rows, an int that is not negative.")


@dataclass(frozen=True)
class Manual(Policy):
    """The kernel communicates itself, over mesh axes that its keyword `shard`, a `ShardContext`, names.

    Only `Manual` axes may share a mesh axis. A mesh axis that no axis of an output is sharded over needs
    `reduces=True`. Gradients follow from one rule: cotangents of what several devices hold in common add up. So the
    cotangent of an output under `reduces=True` arrives on shard 0 and is zero on the others, and the gradients of
    an argument that lacks the axis are added up over its mesh axes. JAX's own transposes (of `psum`, `all_gather`,
    `ppermute`, ...) keep this rule; a backward written by hand must.

    Attributes:
        reduces: the kernel adds up (or brings together) what the shards found, and every shard returns the same
            outputs where these lack the axis.
    """

    reduces: bool = False


def check_policies(policies: Mapping[str, Policy], signature: KernelSignature, kernel: str) -> dict[str, Policy]:
    """Complete `policies` with `Local` and refuse those that cannot be.

    Raises:
        PolicyError: an axis that the signature lacks, something that is no policy, `Parallel` on an axis that some
            output lacks, `Sum` on an axis that every output has, `Halo` on an axis that some output lacks, or that is
            aligned with an axis that cannot be, or a policy on an axis that no input has.
    """
    for axis, policy in policies.items():
        if axis not in signature.core_axes:
            raise PolicyError(
                f'kernel {kernel!r}: policies= names axis {axis!r}, which is not in its signature "{signature}" '
                f"(its core axes are {', '.join(signature.core_axes) or 'none'})."
            )
        if not isinstance(policy, Policy):
            hint = f"; write {policy.__name__}()" if isinstance(policy, type) else ""
            raise PolicyError(
                f"kernel {kernel!r}: the policy of axis {axis!r} is {policy!r}, which is none of Local(), Parallel(), "
                f"Gather(), Sum(), Halo(before, after), Manual(){hint}."
            )
        if isinstance(policy, Local):
            continue
        if axis not in signature.input_axes:
            raise PolicyError(
                f'kernel {kernel!r}: axis {axis!r} is {policy}(), but no argument of "{signature}" has it, so it is '
                "never sharded. Drop the policy."
            )
        lacking = [i for i, out in enumerate(signature.outputs) if axis not in out.axes]
        if isinstance(policy, Parallel) and lacking:
            raise PolicyError(
                f'kernel {kernel!r}: axis {axis!r} is Parallel(), but output {lacking[0]} of "{signature}" lacks it: '
                "what would each shard's result be? Use Sum() where the kernel sums over it, Gather() where it needs "
                "it whole."
            )
        if isinstance(policy, Halo) and policy.aligned_with is not None:
            _check_aligned(axis, policy, policies, signature, kernel)
        elif isinstance(policy, Halo) and lacking:
            raise PolicyError(
                f'kernel {kernel!r}: axis {axis!r} is Halo(), but output {lacking[0]} of "{signature}" lacks it: what '
                "would each shard's result be? Give the output the axis and reduce it afterwards, or use Gather()."
            )
        if isinstance(policy, Sum) and not lacking:
            raise PolicyError(
                f'kernel {kernel!r}: axis {axis!r} is Sum(), but every output of "{signature}" still has it, so '
                "nothing is summed over it. Use Parallel() where indices are independent, Gather() where the axis is "
                "needed whole."
            )
    return {axis: policies.get(axis, Local()) for axis in signature.core_axes}


def _check_aligned(
    axis: str, policy: Halo, policies: Mapping[str, Policy], signature: KernelSignature, kernel: str
) -> None:
    leader = policies.get(policy.aligned_with or "", Local())
    leads = isinstance(leader, Parallel | Sum | Manual) or (isinstance(leader, Halo) and leader.aligned_with is None)
    if policy.aligned_with in signature.input_axes and policy.aligned_with != axis and leads:
        return
    raise PolicyError(
        f"kernel {kernel!r}: axis {axis!r} is Halo(aligned_with={policy.aligned_with!r}), which must be another core "
        f'axis of an argument of "{signature}", with a policy of its own, Parallel(), Sum(), Manual() or Halo(), '
        "under which it may be sharded."
    )
