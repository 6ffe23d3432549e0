"""``xamp.apex.amp`` says what the last ``apex.amp`` said: each refusal, warning and answer, but for the defects.

``tests/data/apex/messages.json`` holds what the real one answered to the cases of ``apex_messages``.

Covers: xamp.apex.amp, xamp.apex._frontend, xamp.apex._properties, xamp.apex._functions, xamp.apex._wrappers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import apex_messages
import forking
import pytest
from forked_python import python

from xamp.apex import amp

DATA = Path(__file__).parents[2] / "data" / "apex" / "messages.json"
RECORDED: dict[str, dict[str, Any]] = {
    name: {key: row[key] for key in ("raised", "printed", "returned") if key in row}
    for name, row in json.loads(DATA.read_text(encoding="utf-8"))["cases"].items()
}
ON_CUDA = ("half_parameter", "half_parameter_inside", "half_buffer", "second_initialize_at_o2")
"""Cases whose text names what the device should have; Apex knew one device."""

_FIRST = "loss scaler 0 reducing loss scale to 32768.0"
INTENDED: dict[str, tuple[dict[str, Any], str]] = {
    "cpu_parameter": ({}, "models train on any device"),
    "cpu_buffer": ({}, "models train on any device"),
    "unscale_of_fp16_gradients": ({}, "what Apex printed once in a process"),
    "disable_casts_before_initialize": ({}, "defect 10"),
    "name_clash": ({}, "nothing is put into an optimizer under such names"),
    "double_model_at_o1": ({}, "float64 parameters train as they are"),
    "bf16_group_added_at_o2": ({}, "bfloat16 parameters get masters too"),
    "double_group_added_at_o0": ({}, "float64 parameters train as they are"),
    "group_no_dict": ({"raised": ["TypeError", "param_group must be a dict, but got <class 'list'>"]}, "torch's words"),
    "output_ordered_dict": ({"returned": "OrderedDict"}, "defect 8"),
    "output_named_tuple": ({"returned": "Pair"}, "defect 8"),
    "groups_before_and_after": ({"returned": ["float32", "float32"]}, "masters are there at once"),
    "promote_double": ({"returned": "float64"}, "defect 10: float64 is left to torch"),
    "disable_casts_and_an_error": ({"returned": "float16"}, "defect 10"),
    "cache_counts": ({"returned": [0, 2, 0]}, "an evaluation leaves no casts behind"),
    "handle_scale_loss": ({}, "defect 11"),
    "wrapped_optimizer": ({"printed": [f"Gradient overflow.  Skipping step, {_FIRST}"]}, "defect 11"),
    "zero_grad_set_to_none": ({}, "defect 9"),
    "step_before_backward": ({}, "masters are there at once"),
    "scale_slides_to_nothing": ({"returned": 2.0**-126}, "defect 5"),
    "switched_off_state_dict": ({"returned": {}}, "defect 9"),
}
"""What xamp answers where it means to differ, and why."""


def expected(name: str) -> dict[str, Any]:
    if name in INTENDED:
        return INTENDED[name][0]
    found: dict[str, Any] = json.loads(json.dumps(RECORDED[name]))
    if "printed" in found:  # there are no kernels to miss
        found["printed"] = [line for line in found["printed"] if "multi_tensor_applier" not in line]
    if name in ON_CUDA:
        found["raised"][1] = found["raised"][1].replace("expected torch.cuda.", "expected torch.")
    return found


def test_every_case_is_recorded() -> None:
    assert set(apex_messages.CASES) == set(RECORDED)
    assert set(INTENDED) < set(RECORDED)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("name", [*apex_messages.names(alone=False)])
def test_as_apex(name: str) -> None:
    found = apex_messages.run(amp, name)
    if name in INTENDED:
        assert found != RECORDED[name], "it is as Apex's: no exception"
    if name in INTENDED and "returned" not in INTENDED[name][0]:
        found.pop("returned", None)
    assert found == expected(name)


ALONE = [*apex_messages.names(alone=True)]
FORKED = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
import apex_messages
from xamp.apex import amp
for name in sys.argv[2:]:
    if not os.fork():
        print("ANSWER", json.dumps([name, apex_messages.run(amp, name)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Of each case in a process that has imported torch and xamp, and has done nothing yet."""
    command = [python(), "-W", "ignore", "-c", FORKED, json.dumps(sys.path), *ALONE]
    environment = {**os.environ, **forking.SETTINGS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.partition("ANSWER ")[2] for line in done.stdout.splitlines() if "ANSWER " in line]
    return dict(map(json.loads, lines))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_as_apex_in_a_fresh_process(name: str, answers: dict[str, Any]) -> None:
    assert answers[name] == expected(name)
