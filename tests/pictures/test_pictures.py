# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""The pictures themselves: SVG and HTML of plans of all kinds."""

import contextlib
import dataclasses
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis, NamedArray

from haliax_kernels import AttentionMask, Parallel, flash_attention, flash_attention_plan, named_kernel
from haliax_kernels.distributions import DistributionError
from haliax_kernels.pictures.arrays import array_views, spans, ticks
from haliax_kernels.plan import AxisPlan
from haliax_kernels.recording import recorded_calls
from haliax_kernels.ring_plan import RingPlan
from support import make_mesh

matplotlib = pytest.importorskip("matplotlib")
Batch, Embed, Row = Axis("batch", 8), Axis("embed <&> $x_1$", 4), Axis("row", 16)


@named_kernel("row -> row", policies={"row": Parallel()})
def copy(x, scale=1.0, *rest):
    return x


def plan_of(mapping, *rest, sizes=None, arrays=(Batch, Embed, Row)):
    with jax.set_mesh(make_mesh(**(sizes or {"data": 2, "model": 4}))):
        return copy.plan(hax.ones(arrays), *rest, axis_mapping=mapping)


@contextlib.contextmanager
def sharded_sequence(mesh=None, mapping=None):
    with (
        jax.set_mesh(make_mesh(**(mesh or {"data": 2, "context": 4}))),
        hax.axis_mapping(mapping or {"batch": "data", "position": "context"}),
    ):
        yield


def attention_plan(mode, mask=None):
    axes = Batch, Axis("head", 4), Axis("position", 512), Axis("head_size", 8)
    q = NamedArray(jax.ShapeDtypeStruct((8, 4, 512, 8), jnp.bfloat16), axes)
    k, mask = q.rename({"position": "key_position"}), mask or AttentionMask.causal()
    return flash_attention_plan("position", "key_position", "head_size", q, k, k, mask, context_parallel=mode)


def ring_plan(mode):
    with sharded_sequence():
        return attention_plan(mode)


def texts_of(svg):
    """Every text of a picture, in the order in which it is drawn."""
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]


def between(texts, first, last=None):
    part = texts[texts.index(first) + 1 :]
    return part[: part.index(last)] if last else part


def test_the_blocks_of_an_array():
    texts = texts_of(plan_of({"batch": ("model", "data"), "row": None}).show().svg)
    assert "\u2192 batch 8 over model + data (8)" in texts
    assert "Mesh data 2 x model 4. Numbers in the blocks are devices: number = 4 data + model." in " ".join(texts)
    # The shards of the batch from left to right; then the ruler.
    numbers = [t for t in between(texts, "x", "output") if t.isdigit()]
    assert numbers == [*"04152637", "0", "16", *"012345678"]


def test_rows_columns_and_what_is_not_drawn():
    sizes = {"a": 2, "b": 2, "c": 2}
    texts = texts_of(plan_of({"batch": "a", Embed.name: "c", "row": "b"}, sizes=sizes).show().svg)
    x = between(texts, "x", "output")
    assert [t for t in x if t.startswith(("\u2193", "\u2192"))] == [
        "\u2193 embed <&> $x_1$ 4 over c (2)",
        "\u2192 row 16 over b (2)",
    ]
    assert "batch 8 over a (2): shown is shard 0" in x
    # Devices 4 b + ... of the first half of a: rows are c, columns b.
    assert [t for t in x if t.isdigit()][:4] == ["0", "2", "1", "3"]


def test_a_shard_on_several_devices_and_a_whole_array():
    texts = texts_of(plan_of({"batch": "model"}, jnp.ones(3), jax.random.key(0)).show().svg)
    assert {"0, 4", "1, 5", "2, 6", "3, 7"} <= set(texts)
    scale = between(texts, "scale", "rest[0]")
    assert "all 8 devices" in scale and "an array of shape (3,)" in scale
    assert {"all 8 devices", "a scalar"} <= set(between(texts, "rest[0]", "output"))


def test_many_shards_are_left_out():
    axis = AxisPlan("batch", None, True, 64, ("data",), 16)
    along = spans(axis, None)
    assert [s.index for s in along] == [0, 1, 2, 3, 4, 5, None, 15]
    assert [index for _, index in ticks(axis, along)] == [0, 4, 8, 12, 16, 20, 24, 60, 64]
    assert sum(s.length for s in along) == pytest.approx(1)
    assert [s.index for s in spans(axis, axis)] == [0, 1, 2, None, 15]
    assert [s.index for s in spans(None, axis)] == [0]


REFUSED = {
    "one mesh axis for two axes": {"batch": "data", "row": "data"},
    "no such mesh axis": {"batch": "dta"},
    "uneven": {"row": ("data", "model"), "batch": None},
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_plans(case):
    arrays = (Batch, Axis("row", 20)) if case == "uneven" else (Batch, Row)
    plan = plan_of(REFUSED[case], arrays=arrays)
    assert plan.refusals
    view = plan.show()
    assert any(t.startswith(f"refused: {type(plan.refusals[0]).__name__}") for t in texts_of(view.svg))
    assert type(plan.refusals[0]).__name__ in view.html and "none, forward and backward" not in view.html


def test_a_plan_without_arrays():
    """The binding is refused before there is a plan of any array."""
    plan = plan_of({}, arrays=(Batch,))
    assert plan.refusals and not plan.inputs
    assert any(t.startswith("refused: BindingError") for t in texts_of(plan.show().svg))


def test_no_mesh_and_plain_arrays():
    texts = texts_of(copy.plan(jnp.ones(5), jnp.float32(2)).show().svg)
    assert "No mesh: the kernel is called directly." in texts
    assert "\u2192 row 5" in texts and "whole" in texts


def test_outputs_of_unknown_size():
    plan = plan_of({"batch": "data"})
    (out,) = plan.outputs
    unknown = dataclasses.replace(
        out, dtype=None, axes=tuple(dataclasses.replace(a, size=-1) if a.name == "row" else a for a in out.axes)
    )
    texts = texts_of(dataclasses.replace(plan, outputs=(unknown,)).show().svg)
    assert any("row ?" in t for t in texts) and "dtype and size known once the kernel is traced" in texts
    assert [v.title for v in array_views(dataclasses.replace(plan, outputs=(out, out)))] == [
        "x",
        "output 0",
        "output 1",
    ]


class _Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.data, self.tables = [], [], 0

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)
        self.tables += tag == "table"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.data.append(data)


def test_html():
    plan = ring_plan("zigzag")
    view = plan.show()
    parser = _Balanced()
    parser.feed(view._repr_html_())
    assert parser.open == [] and parser.tables == 2  # axes, collectives
    assert {"collective-permute", "key_position", plan.notes[0]} <= set(parser.data)
    assert view.svg in view.html and view.svg.startswith("<svg ") and "aria-label=" in view.svg
    assert repr(view) == "PlanView(kernel='flash_attention')"
    assert plan._repr_html_() == view.html


def test_names_are_escaped():
    html = plan_of({"batch": "data"}).show().html
    assert Embed.name not in html and html.count("embed &lt;&amp;&gt; $x_1$") >= 2


def test_the_same_plan_makes_the_same_picture(monkeypatch):
    plan = ring_plan("ring")
    first = plan.show().svg
    before = dict(matplotlib.rcParams)
    # Whatever else is drawn in the same process.
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 40.0)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "black")
    assert plan.show().svg == first
    monkeypatch.undo()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("mode", ["ring", "zigzag"])
def test_a_ring_is_drawn(mode):
    plan = ring_plan(mode)
    assert plan.ring == RingPlan(("context",), 4, mode == "zigzag", 128, 128, None, 0, 0)
    texts = texts_of(plan.show().svg)
    taken = " (this plan)"
    assert "ring over context: 4 shards" in texts
    contiguous = f"contiguous{taken if mode == 'ring' else ''}: critical path 4 blocks, devices idle 38% of the time"
    zigzag = f"zigzag{taken if mode == 'zigzag' else ''}: critical path 2.25 blocks, devices idle 0% of the time"
    assert texts.index(contiguous) < texts.index(zigzag)
    assert any("Shard i is the devices where context = i." in t for t in texts)


@pytest.mark.parametrize("mode", ["allgather", "ulysses"])
def test_no_ring_no_chart(mode):
    plan = ring_plan(mode)
    assert plan.ring is None
    assert not any(t.startswith("ring over") for t in texts_of(plan.show().svg))


def test_a_ring_over_the_major_axis_of_two():
    """Ulysses over the minor axis brings its rows together, and the ring has as many more of them."""
    mesh, mapping = {"node": 2, "chip": 4}, {"position": ("node", "chip")}
    with sharded_sequence(mesh, mapping):
        plan = attention_plan({"node": "ring", "chip": "ulysses"}, AttentionMask.causal(sliding_window=100))
    assert plan.ring == RingPlan(("node",), 2, False, 256, 256, 99, 0, 0)


def test_an_offset_on_the_device():
    plans = []

    def trace(offset):
        plans.append(attention_plan("ring", AttentionMask.causal(offset=hax.named(offset, ()))))

    with sharded_sequence():
        jax.eval_shape(trace, jnp.int32(3))
    (plan,) = plans
    assert plan.ring is not None and plan.ring.q_offset is None
    assert "known on the device only" in " ".join(texts_of(plan.show().svg))


def test_recorded_plans_have_their_ring():
    axes = Axis("head", 4), Axis("position", 64), Axis("head_size", 8)
    q = hax.ones(axes)
    k = q.rename({"position": "key_position"})
    with sharded_sequence({"context": 4}, {"position": "context"}), recorded_calls() as calls:
        options = {"mask": AttentionMask.causal(), "context_parallel": "zigzag"}
        jax.eval_shape(lambda: flash_attention("position", "key_position", "head_size", q, k, k, **options).array)
        copy(hax.ones(Axis("row", 4)))
    assert [call.plan.ring for call in calls] == [RingPlan(("context",), 4, True, 16, 16, None, 0, 0), None]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setattr("haliax_kernels.distributions.installed_version", lambda name: None)
    plan = plan_of({"batch": "data"})
    with pytest.raises(ImportError, match=r"pip install 'haliax-kernels\[pictures\]'") as caught:
        plan.show()
    assert isinstance(caught.value, DistributionError)
    html = plan._repr_html_()
    assert "<table>" in html and "<svg" not in html


def test_matplotlib_is_imported_to_draw_only():
    modules = "haliax_kernels, haliax_kernels.cli.main, haliax_kernels.pictures.html, haliax_kernels.pictures.schedule"
    program = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
