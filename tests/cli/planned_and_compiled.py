# Copyright The haliax-kernels Authors
# SPDX-License-Identifier: Apache-2.0

"""Run as a script by test_plan.py: the collectives of the first kernel of a config, planned and in its program.

    python planned_and_compiled.py CONFIG DEVICES

The program is one call's forward and backward, compiled for CPU devices: what XLA's TPU compiler makes of collectives
that could be merged or replaced is its own choice.
"""

import json
import pathlib
import sys

from haliax_kernels.cpu_devices import use_cpu_devices

use_cpu_devices(int(sys.argv[2]))

import jax

from haliax_kernels.levanter.model_plan import plan_model
from haliax_kernels.levanter.programs import gradient
from haliax_kernels.levanter.run_config import RunConfig
from support import collectives, planned

# The configs for TPUs insist on a kernel that CPU devices cannot run, and on CPU devices bfloat16 travels as float32.
args = ["--config_path", sys.argv[1], "--kernels.implementation", "xla", "--trainer.mp", "f32"]
if "type: linear_llama" in pathlib.Path(sys.argv[1]).read_text():
    args += ["--model.linear.implementation", "xla"]
found, run = plan_model(args), RunConfig.load(args)
((call, _),) = found.calls
with run.trainer.use_device_mesh():
    forward = jax.jit(call.run, in_shardings=[x.sharding for x in gradient(call, run.trainer.device_mesh).arguments])
    both = gradient(call, run.trainer.device_mesh)
    text = [
        forward.lower(*both.arguments).compile().as_text(),
        jax.jit(both.run).lower(*both.arguments).compile().as_text(),
    ]
print(
    json.dumps(
        {
            "planned": [planned(call.plan, "forward"), planned(call.plan, "forward", "backward")],
            "compiled": [collectives(t) for t in text],
        }
    )
)
