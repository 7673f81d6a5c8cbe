# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Forward + backward against the length of the sequence: our linear attention beside our causal flash attention.

    python benchmarks/linear_vs_flash.py [cpu | tpu] [--lengths 512 1024 ...] [--decay none token head channel]
                                         [--rounds 5] [--limit 60] [--plot FILE] [--json FILE]

`cpu`: seconds on this machine, float32, 8 heads of size 64; the ways interleaved round by round, each after an untimed
run of its own, medians. `quadratic` is linear attention without decay as two einsums with a masked matrix between
them, up to the length whose matrix fits. Instead of what would take longer than `--limit` seconds a run, judged by the
length before, there is a dash. Single times on a shared machine mean little: look at the ratios.

`tpu`: cycles of the Pallas kernels on a TPU v5e, bfloat16, 2 heads of size 128, counted without a TPU in what its
compiler schedules, as `tpu_static.py` explains. Nothing outside the kernels is in them, nor are waits for memory. The
column `memory (linear)` has the cycles that the traffic of the linear kernels without decay takes at 819 GB/s: where
it is the larger of the two, it is what counts. `bound (linear)` has those of the matrix units at their peak, for the
operations that the chunked algorithm without decay needs: of each chunk of 128 positions half the square of scores,
twice, and two products with the state; the backward's are 2.5 times the forward's.

Linear attention is not normalised and has no feature map, which is the caller's. A decay has a gradient, too. Without
a part both run, and the plot has a panel for each.
"""

import argparse
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from timing import medians

from haliax_kernels.attention import xla as attention_xla
from haliax_kernels.attention.contract import AttentionOperands, AttentionOptions
from haliax_kernels.attention.differentiable import attention
from haliax_kernels.linear import pallas_tpu as linear_pallas_tpu
from haliax_kernels.linear import xla as linear_xla
from haliax_kernels.linear.contract import LinearImplementation, LinearOperands, LinearOptions
from haliax_kernels.linear.differentiable import linear_attention
from haliax_kernels.linear.pallas_tpu.plan import plan_for

LENGTHS = [2**n for n in range(9, 17)]
DECAYS = ("none", "token", "head", "channel")
CPU_HEADS, CPU_SIZE = 8, 64
TPU_SIZE = 128
# Of float32 scores, some of which are alive at once: 2 GiB each for 8 heads.
LONGEST_QUADRATIC = 8192
# The v5e's bytes per second over its clock.
TPU_BYTES_PER_CYCLE = 819e9 / 1.5e9

Attention = Callable[..., jax.Array]


# --- programs --------------------------------------------------------------------------------------------------------


def linear(implementation: LinearImplementation, size: int) -> Attention:
    """From q, k, v of (heads, length, size), and a decay if there is one, to an output of the same shape."""
    options = LinearOptions(scale=size**-0.5)

    def one(q: jax.Array, *others: jax.Array) -> jax.Array:
        return linear_attention(implementation, options, LinearOperands(q[None], *others))[0][0]

    return jax.vmap(one)


def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    options = AttentionOptions(scale=q.shape[-1] ** -0.5, right=0)

    def one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(attention_xla, options, AttentionOperands(q[None], k, v))[0][0]

    return jax.vmap(one)(q, k, v)


def quadratic(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    positions = jnp.arange(q.shape[1])
    scores = q.shape[-1] ** -0.5 * jnp.einsum("hid,hjd->hij", q, k)
    return jnp.einsum("hij,hje->hie", jnp.where(positions[:, None] >= positions, scores, 0), v)


def gradient(f: Attention) -> Callable[..., tuple[jax.Array, ...]]:
    """Forward and backward, by every operand."""

    def both(*operands: jax.Array) -> tuple[jax.Array, ...]:
        o, pullback = jax.vjp(f, *operands)
        return o, *pullback(o)

    return both


def decay_shape(decay: str, heads: int, length: int, size: int) -> tuple[int, ...] | None:
    return {"none": None, "head": (heads,), "token": (heads, length), "channel": (heads, length, size)}[decay]


def name_of(decay: str) -> str:
    return "linear" if decay == "none" else f"linear, {decay} decay"


# --- the two parts ---------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """What one part measures: a row for each length, in which a number may be missing."""

    title: str
    unit: str
    ways: list[str]
    number: str
    rows: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def linear_ways(self) -> list[str]:
        return [way for way in self.ways if way.startswith("linear")]

    def ratio(self, length: int, way: str) -> float | None:
        row = self.rows[length]
        return row["flash"] / row[way] if "flash" in row and way in row else None

    def print_table(self, rows: Iterator[tuple[int, dict[str, float]]]) -> None:
        """As the rows come, and in the end the crossovers."""
        heads = ["positions", *self.ways, *(f"flash / {way}" for way in self.linear_ways)]
        widths = [max(len(head), 10) for head in heads]

        def line(cells: list[str]) -> str:
            return "| " + " | ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) + " |"

        print(f"{self.title}\n\n{line(heads)}\n|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|", flush=True)
        for length, row in rows:
            self.rows[length] = row
            numbers = [format(row[way], self.number) if way in row else "-" for way in self.ways]
            ratios = [self.ratio(length, way) for way in self.linear_ways]
            print(line([str(length), *numbers, *("-" if r is None else f"{r:.2f}" for r in ratios)]), flush=True)
        print()
        for way in self.linear_ways:
            print(f"{way}: {self.crossover(way)}")
        print(flush=True)

    def crossover(self, way: str) -> str:
        """Where it becomes cheaper than flash for good, between two lengths by a straight line in logarithms."""
        ratios = [(s, r) for s in sorted(self.rows) if (r := self.ratio(s, way)) is not None]
        dearer = [n for n, (_, ratio) in enumerate(ratios) if ratio < 1]
        if not ratios:
            return "nothing to compare"
        if not dearer:
            return "cheaper than flash at all lengths shown"
        if dearer[-1] == len(ratios) - 1:
            return f"not cheaper than flash at {ratios[-1][0]} positions, the longest compared"
        (s0, r0), (s1, r1) = ratios[dearer[-1]], ratios[dearer[-1] + 1]
        at = s0 * (s1 / s0) ** (-math.log(r0) / (math.log(r1) - math.log(r0)))
        return f"cheaper than flash from about {at:.0f} positions on"


def cpu_rows(lengths: list[int], decays: list[str], rounds: int, limit: float) -> Iterator[tuple[int, dict]]:
    before: dict[str, tuple[int, float]] = {}

    def too_long(name: str, length: int) -> bool:
        if name not in before:
            return False
        s, seconds = before[name]
        return seconds * (length / s) ** (1 if name.startswith("linear") else 2) > limit

    for length in lengths:
        keys = jax.random.split(jax.random.key(0), 4)
        qkv = [jax.random.normal(key, (CPU_HEADS, length, CPU_SIZE)) for key in keys[:3]]
        ways: dict[str, tuple[Attention, list[jax.Array]]] = {}
        for decay in decays:
            shape = decay_shape(decay, CPU_HEADS, length, CPU_SIZE)
            log = [] if shape is None else [-0.05 * jax.random.uniform(keys[3], shape)]
            ways[name_of(decay)] = linear(linear_xla, CPU_SIZE), [*qkv, *log]
        ways["flash"] = flash, qkv
        if length <= LONGEST_QUADRATIC:
            ways["quadratic"] = quadratic, qkv
        programs: dict[str, Callable[[], Any]] = {}
        for name, (f, operands) in ways.items():
            if not too_long(name, length):
                compiled = jax.jit(gradient(f)).lower(*operands).compile()
                programs[name] = partial(compiled, *operands)
        row = medians(programs, rounds)
        before |= {name: (length, seconds) for name, seconds in row.items()}
        yield length, row


def tpu_rows(lengths: list[int], decays: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    # It sets what libtpu reads when it starts, and makes a folder for what the compiler writes.
    import tpu_static
    from jax.sharding import NamedSharding, PartitionSpec

    heads = tpu_static.HEADS
    sharding = NamedSharding(tpu_static.topology_mesh("v5e:2x2", {"x": 1}), PartitionSpec())
    seen: set[str] = set()

    def cycles(kernel: tpu_static.KernelSchedule, steps: int) -> float:
        """The body once for each step of the grid; the loop turns more often, to fill and drain the pipeline."""
        (loop,) = [body for body in kernel.root.inner if body.kind == "loop"]
        (step,) = [body for body in loop.inner if kernel.multiplies(body)]
        return kernel.root.own + loop.trips * loop.own + steps * tpu_static.cycles(kernel, step, 1)

    for length in lengths:
        x = jax.ShapeDtypeStruct((heads, length, TPU_SIZE), jnp.bfloat16, sharding=sharding)
        row: dict[str, float] = {}
        for decay in decays:
            shape = decay_shape(decay, heads, length, TPU_SIZE)
            log = [] if shape is None else [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)]
            one = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (x, x, x, *log)]
            one[0] = jax.ShapeDtypeStruct((1, *one[0].shape), one[0].dtype)
            plan = plan_for(LinearOptions(), LinearOperands(*one), backward=True)
            kernels = tpu_static.compiled_kernels(gradient(linear(linear_pallas_tpu, TPU_SIZE)), (x, x, x, *log), seen)
            row[name_of(decay)] = sum(cycles(kernel, heads * plan.blocks) for kernel in kernels)
            if decay == "none":
                # A position meets half a chunk, twice, and a state, twice; 2 operations for each pair of numbers.
                operations = length * 2 * (2 * plan.size / 2 * TPU_SIZE + 2 * TPU_SIZE**2)
                row["bound (linear)"] = heads * 3.5 * operations / tpu_static.PEAK["v5e"]
                # Of q, k, v, y; of these but y, their gradients and dy; the states at the blocks' starts out and in.
                tokens, states = (4 + 7) * length * TPU_SIZE * 2, 2 * plan.blocks * TPU_SIZE**2 * 4
                row["memory (linear)"] = heads * (tokens + states) / TPU_BYTES_PER_CYCLE
        row["flash"] = tpu_static.ours(length, TPU_SIZE, None)((x,) * 4, seen)[1]
        yield length, row


# --- output ----------------------------------------------------------------------------------------------------------


def plot(parts: list[Part], path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("No plot: matplotlib is missing; pip install 'haliax-kernels[bench]'")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    ways = dict.fromkeys(way for part in parts for way in part.ways)  # one colour each, in every panel
    colours = {way: f"C{i}" for i, way in enumerate(ways)}
    figure, panels = pyplot.subplots(1, len(parts), figsize=(6.4 * len(parts), 4.8), squeeze=False)
    for part, panel in zip(parts, panels[0], strict=True):
        for way in part.ways:
            points = [(length, row[way]) for length, row in part.rows.items() if way in row]
            if points:
                style = "--" if way.startswith(("bound", "memory")) else "o-"
                panel.plot(*zip(*points, strict=True), style, color=colours[way], markersize=4, label=way)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sorted(part.rows), [str(length) for length in sorted(part.rows)], fontsize="small")
        panel.set(xlabel="positions", ylabel=part.unit)
        panel.set_title(part.title, fontsize="small")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"Plot: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("cpu", "tpu", "both"), default="both")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--decay", nargs="+", choices=DECAYS, default=["none", "token"])
    parser.add_argument("--rounds", type=int, default=5, help="of the CPU's times")
    parser.add_argument("--limit", type=float, default=60, help="seconds a run on the CPU may take")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path(__file__).with_suffix(".png"))
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    lengths, decays = sorted(options.lengths), list(dict.fromkeys(options.decay))
    names = [name_of(decay) for decay in decays]
    parts: list[Part] = []
    if options.part in ("cpu", "both"):
        title = f"CPU, float32, {CPU_HEADS} heads of {CPU_SIZE}, forward + backward, seconds"
        parts.append(Part(title, "seconds", [*names, "flash", "quadratic"], ".4f"))
        parts[-1].print_table(cpu_rows(lengths, decays, options.rounds, options.limit))
    if options.part in ("tpu", "both"):
        title = f"TPU v5e, bfloat16, 2 heads of {TPU_SIZE}, forward + backward, estimated cycles"
        bounds = ["bound (linear)", "memory (linear)"] if "none" in decays else []
        parts.append(Part(title, "cycles", [*names, *bounds, "flash"], ",.0f"))
        parts[-1].print_table(tpu_rows(lengths, decays))
    if options.json:
        figures = [{"part": part.title, "rows": part.rows} for part in parts]
        options.json.write_text(json.dumps({"jax": jax.__version__, "parts": figures}, indent=1))
    plot(parts, options.plot)


if __name__ == "__main__":
    main()
