# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""`haliax-kernels plan` on the example configs, and on configs with one mistake each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from haliax_kernels.levanter import config as options
from haliax_kernels.levanter.config import KernelsConfigError
from haliax_kernels.levanter.model_plan import plan_model
from launching import EXAMPLES

TINY = EXAMPLES / "llama_tiny_context_parallel.yaml"


@pytest.fixture(autouse=True)
def own_options():
    """A plan puts the options of its config in force."""
    with options.use_options(options.KernelsConfig()):
        yield


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "haliax_kernels", *map(str, args)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, where",
    [
        ("gpt2_small_v5e", "--topology=v5e:4x4"),
        ("linear_llama_7b_128k_v5p", "--topology=v5p:4x4x4"),
        ("linear_llama_tiny_cpu", "--devices=8"),
        ("llama_7b_128k_v5p", "--topology=v5p:4x4x4"),
        ("llama_7b_v5p", "--topology=v5p:4x4x4"),
        ("llama_tiny_context_parallel", "--devices=8"),
        ("llama_tiny_cpu", "--devices=8"),
    ],
)
def test_every_example(name, where):
    done = command("plan", EXAMPLES / f"{name}.yaml", where, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernel = "linear_attention" if name.startswith("linear") else "flash_attention"
    assert [k["kernel"] for k in found["kernels"]] == [kernel]
    assert found["warnings"] == [] and found["refusal"] is None
    # The batch is sharded as the mesh says, and so is the sequence, where it is.
    call = found["kernels"][0]
    sharded = {a["name"]: a["size"] // a["local_size"] for a in call["inputs"][0]["axes"]}
    mesh = found["mesh"]
    assert sharded["batch"] == mesh["data"] * mesh["replica"]
    assert sharded["position"] == mesh.get("context", 1)
    assert bool(call["collectives"]) == ("context" in mesh)


def test_what_a_call_says():
    found = plan_model(["--config_path", str(TINY)], "cpu")
    ((plan, _),) = found.plans
    assert found.refusal is None and found.warnings == ()
    assert (found.batch, found.length) == (16, 256)
    assert {x.label for x in plan.inputs} >= {"q", "k", "v", "q_segment_ids"}
    assert any("zigzag over context" in note for note in plan.notes)
    assert {c.mesh_axes for c in plan.collectives} == {("context",)}


def changed(tmp_path, changes):
    """The tiny config with other values, by their keys."""
    content = yaml.safe_load(TINY.read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
    file = tmp_path / "run.yaml"
    file.write_text(yaml.dump(content))
    return file


def test_an_idle_mesh_axis_is_a_warning(tmp_path):
    file = changed(tmp_path, {"trainer.mesh.shared_mapping": {"mlp": "model", "heads": "model"}})
    found = plan_model(["--config_path", str(file)], "cpu")
    assert len(found.warnings) == 1 and "'model' (2 devices)" in found.warnings[0]


@pytest.mark.parametrize("mode, shards, warned", [("ring", 4, True), ("zigzag", 4, False), ("ring", 1, False)])
def test_unequal_work_of_a_ring_is_a_warning(tmp_path, mode, shards, warned):
    axes = {"data": 8 // shards, "model": 1, "context": shards}
    file = changed(tmp_path, {"trainer.mesh.axes": axes, "kernels.context_parallel": mode})
    found = plan_model(["--config_path", str(file)], "cpu")
    assert found.refusal is None and len(found.warnings) == warned
    if warned:
        # Of 10 blocks of a causal mask the last of 4 devices computes 4; each step waits for one.
        assert (
            "over 'context' unequal work: the ring waits for 4 blocks, of which a device computes 2.5"
            in found.warnings[0]
        )


# What is put into the config; keys and words that the line must have.
MESH = "trainer.mesh"
MISTAKES = {
    "array axis misspelt": (
        {f"{MESH}.compute_mapping": {"positon": "context"}},
        f"{MESH}.compute_mapping.positon",
        "did you mean 'position'",
    ),
    "mesh axis misspelt": (
        {f"{MESH}.compute_mapping": {"position": "contxt"}},
        f"{MESH}.compute_mapping.position",
        "did you mean 'context'",
    ),
    "mesh larger than the devices": ({f"{MESH}.axes.model": 4}, f"{MESH}.axes", "-1"),
    "heads": ({f"{MESH}.axes": {"data": 2, "model": 4, "context": 1}}, f"{MESH}.axes.model", "kv_head"),
    "sequence": ({"model.max_seq_len": 255}, f"{MESH}.axes.context", "256"),
    "zigzag halves": ({"model.max_seq_len": 254}, "kernels.context_parallel", "'ring'"),
    "batch": ({"trainer.train_batch_size": 15}, "trainer.train_batch_size", "Use 16"),
    "backend": ({"model.attn_backend": "palas_flash"}, "attn_backend", "did you mean 'pallas_flash'"),
    "kernels key": ({"kernels.contxt_parallel": "ring"}, "kernels.contxt_parallel", "did you mean 'context_parallel'"),
    "kernels value": ({"kernels.context_parallel": "zigzg"}, "kernels.context_parallel", "did you mean 'zigzag'"),
    "splash": ({"kernels.implementation": "splash"}, "kernels.implementation", "context_parallel"),
    "ulysses": (
        {"kernels.context_parallel": "ulysses", f"{MESH}.axes": {"data": 1, "model": 2, "context": 4}},
        "kernels.context_parallel",
        "Use 'ring'",
    ),
    "block too large": (
        {"kernels.block_q": 8192, "kernels.block_k": 8192, "model.max_seq_len": 32768},
        "kernels.block_q",
        "pass smaller ones",
    ),
    "head size": (
        {f"{MESH}.compute_mapping": {"position": "context", "head_size": "model"}, f"{MESH}.shared_mapping": {}},
        f"{MESH}.compute_mapping.head_size",
        "model",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake, tmp_path):
    changes, key, way_out = MISTAKES[mistake]
    file = changed(tmp_path, changes)
    try:
        line = plan_model(["--config_path", str(file)], "tpu").refusal
    except KernelsConfigError as error:
        line = str(error)
    assert line is not None and line.startswith(f"{file}: ")
    assert key in line and way_out in line
    assert "\n" not in line and "Traceback" not in line


def test_the_implementation_of_a_linear_llama_has_its_own_key():
    file = EXAMPLES / "linear_llama_tiny_cpu.yaml"
    found = plan_model(["--config_path", str(file), "--model.linear.implementation", "pallas_gpu"], "tpu")
    assert found.refusal is not None and found.refusal.startswith(f"{file}: model.linear.implementation: ")


def test_the_command_refuses_in_one_line():
    done = command("plan", TINY, "--devices", 8, "--kernels.context_parallel", "zigzg")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [done.stderr.strip()] and "did you mean 'zigzag'" in done.stderr


@pytest.mark.slow
def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    done = command("plan", TINY, "--devices", 8, "--svg", file)
    assert done.returncode == 0, done.stderr
    texts = ["".join(e.itertext()) for e in ElementTree.parse(file).iter() if e.tag.endswith("}text")]
    assert "\u2192 key_position 256 over context (2)" in texts and "ring over context: 2 shards" in texts
    file.unlink()
    done = command("plan", TINY, "--devices", 8, "--svg", file, "--model.attn_backend", "vanilla")
    assert done.returncode == 1 and "no kernel to draw" in done.stderr and not file.exists()


def test_a_picture_without_a_place(tmp_path):
    done = command("plan", TINY, "--devices", 8, "--svg", tmp_path / "missing" / "plan.svg")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [done.stderr.strip()] and "there is no directory" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, devices",
    [
        ("gpt2_small_v5e", 16),
        ("linear_llama_7b_128k_v5p", 64),
        ("linear_llama_tiny_cpu", 8),
        ("llama_7b_128k_v5p", 64),
        ("llama_7b_v5p", 64),
        ("llama_tiny_context_parallel", 8),
        ("llama_tiny_cpu", 8),
    ],
)
def test_the_numbers_are_those_of_the_program(name, devices):
    script = Path(__file__).with_name("planned_and_compiled.py")
    done = subprocess.run(
        [sys.executable, script, EXAMPLES / f"{name}.yaml", str(devices)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["planned"] == found["compiled"]
