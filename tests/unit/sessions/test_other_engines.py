"""Objects of other mixed-precision engines are refused by name; 8-bit optimizers work beside xamp.

Covers: xamp.sessions.foreign.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import xamp
from xamp.errors import PolicyError, UnsupportedPolicy

X = torch.linspace(-1.0, 1.0, 8).reshape(4, 2)


def from_module(base: type, path: str) -> Any:
    """A subclass of ``base`` whose full name is ``path``."""
    module, _, name = path.rpartition(".")
    return type(name, (base,), {"__module__": module})


@pytest.mark.parametrize(
    ("path", "library", "cure"),
    [
        ("deepspeed.runtime.engine.DeepSpeedEngine", "DeepSpeed", "in its config"),
        ("megatron.core.distributed.distributed_data_parallel.DistributedDataParallel", "Megatron", "--fp16 or --bf16"),
        ("megatron.core.transformer.module.Float16Module", "Megatron", "--fp16 or --bf16"),
        ("colossalai.interface.model.ModelWrapper", "ColossalAI", "in its Booster"),
    ],
)
def test_engines_are_refused_as_models(path: str, library: str, cure: str) -> None:
    made = from_module(nn.Linear, path)(2, 1)
    users = type("Mine", (type(made),), {"__module__": "mine"})(2, 1)
    for found in (made, users):
        with pytest.raises(
            UnsupportedPolicy, match=rf"initialize\(models=\.\.\.\): \w+ is an object of {library}.*{cure}"
        ):
            xamp.initialize(found, verbosity=0)
        assert type(found).__module__ in (path.rpartition(".")[0], "mine"), "and nothing has changed"


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", "DeepSpeed"),
        ("deepspeed.runtime.bf16_optimizer.BF16_Optimizer", "DeepSpeed"),
        ("accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper", "DeepSpeed"),
        ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", "Megatron"),
        ("megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params", "Megatron"),
        ("accelerate.utils.megatron_lm.MegatronLMOptimizerWrapper", "Megatron"),
    ],
)
def test_engines_are_refused_as_optimizers_also_where_they_are_none_of_torch(path: str, library: str) -> None:
    model = nn.Linear(2, 1)
    for base, arguments in ((object, ()), (SGD, (model.parameters(), 0.1))):
        made = from_module(base, path)(*arguments)
        with pytest.raises(UnsupportedPolicy, match=rf"initialize\(optimizers=\.\.\.\): .*of {library}"):
            xamp.initialize(model, made, verbosity=0)
    with pytest.raises(PolicyError, match=r"is no torch\.optim\.optimizer\.Optimizer"):
        xamp.initialize(model, object(), verbosity=0)  # type: ignore[call-overload]


def test_what_only_shares_the_name_of_a_library_is_taken() -> None:
    for path in ("deepspeed.ops.adam.fused_adam.FusedAdam", "megatron.core.models.gpt.GPTModel"):
        model = from_module(nn.Linear, "megatron.core.models.gpt.GPTModel")(2, 1)
        optimizer = from_module(SGD, path)(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, "O1", verbosity=0)
        xamp.session(model).close()


@pytest.mark.parametrize(
    "path",
    [
        "torchao.optim.cpu_offload.CPUOffloadOptimizer",
        "apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam",
    ],
)
def test_an_optimizer_that_takes_gradients_away_is_taken_where_nothing_is_scaled(path: str) -> None:
    model = nn.Linear(2, 1)
    optimizer: Optimizer = from_module(SGD, path)(model.parameters(), lr=0.1)
    for level in ("O1", "O2", "O5"):
        with pytest.raises(UnsupportedPolicy, match=rf"initialize\(level='{level}'\): .* O0 and O4 take it"):
            xamp.initialize(model, optimizer, level, verbosity=0)
    xamp.initialize(model, optimizer, "O4", verbosity=0)


class Bits(SGD):
    """As an 8-bit optimizer: moments in int8 with a scale in fp32, for what it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(moment=torch.zeros_like(param, dtype=torch.int8), scale=torch.zeros(1))
                moment = 0.5 * state["moment"].float() * state["scale"] + param.grad.float()
                state["scale"] = moment.abs().max().reshape(1) / 127
                state["moment"] = (moment / state["scale"].clamp(min=1e-12)).round().to(torch.int8)
                with torch.no_grad():
                    param.sub_((group["lr"] * moment).to(param.dtype))


@pytest.mark.parametrize("path", ["bitsandbytes.optim.adam.Adam8bit", "torchao.optim.adam.AdamW8bit"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_8_bit_optimizers_step_beside_xamp(path: str, level: str) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(2, 1), nn.Linear(2, 1)
    twin.load_state_dict(model.state_dict())
    optimizer, plain = from_module(Bits, path)(model.parameters(), lr=0.1), Bits(twin.parameters(), lr=0.1)
    for found, steps in ((optimizer, model), (plain, twin)):  # it has state before initialize
        steps(X).square().mean().backward()
        found.step()
        found.zero_grad()
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=64.0)
    for _ in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        plain.zero_grad()
        twin(X).square().mean().backward()
        plain.step()
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    states = list(optimizer.state.values())
    assert {s["moment"].dtype for s in states} == {torch.int8}
    assert {s["scale"].dtype for s in states} == {torch.float32}


def test_at_O3_one_that_has_stepped_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = from_module(Bits, "bitsandbytes.optim.adam.Adam8bit")(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedPolicy, match=r"initialize\(level='O3'\): Adam8bit has stepped.*\(O2, O5\)"):
        xamp.initialize(model, optimizer, "O3", verbosity=0)
