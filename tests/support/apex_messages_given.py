"""Cases of ``apex_messages``: the arguments, messages and results of ``amp.initialize``."""

from __future__ import annotations

import importlib
import tempfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from apex_cases import CASES, HALF, Absent, case, dtype_of, model, sgd, start
from torch import nn

# The level and its options


@case
def bad_level(amp: Any) -> None:
    amp.initialize(model(), opt_level="O7", verbosity=0)


@case
def bad_level_with_a_zero(amp: Any) -> None:
    amp.initialize(model(), opt_level="02", verbosity=0)


@case
def cudnn_off(amp: Any) -> None:
    with torch.backends.cudnn.flags(enabled=False):
        amp.initialize(model(), opt_level="O2", verbosity=0)


@case
def o1_cast_model_type(amp: Any) -> None:
    start(amp, "O1", cast_model_type=HALF)


@case
def o1_cast_model_type_float32(amp: Any) -> str:
    net, _ = start(amp, "O1", cast_model_type=torch.float32)
    return dtype_of(net.weight)


@case
def cast_model_type_false(amp: Any) -> str:
    net, _ = start(amp, "O2", cast_model_type=False)
    return dtype_of(net.weight)


@case
def patch_torch_functions_at_o2(amp: Any) -> None:
    start(amp, "O2", patch_torch_functions=True)


@case
def o1_keep_batchnorm_fp32(amp: Any) -> None:
    start(amp, "O1", keep_batchnorm_fp32=True)


@case
def o1_keep_batchnorm_fp32_string(amp: Any) -> None:
    start(amp, "O1", keep_batchnorm_fp32="False")


@case
def bad_keep_batchnorm_fp32(amp: Any) -> None:
    start(amp, "O2", keep_batchnorm_fp32="yes")


@case
def o1_master_weights(amp: Any) -> None:
    start(amp, "O1", master_weights=True)


@case
def o1_master_weights_false(amp: Any) -> None:
    start(amp, "O1", master_weights=False)


@case
def bad_loss_scale(amp: Any) -> None:
    start(amp, "O2", loss_scale="abc")


@case
def hard_override(amp: Any) -> None:
    amp._amp_state.hard_override = True
    start(amp, "O1", master_weights=True)


@case
def unexpected_keyword(amp: Any) -> None:
    start(amp, "O2", no_such_option=1)


def options_case(name: str, level: str, **options: Any) -> None:
    def printed(amp: Any) -> None:
        start(amp, level, verbosity=1, **options)

    CASES[name] = printed


for _level in ("O0", "O1", "O2", "O3"):
    options_case(f"options_{_level}", _level)
options_case("options_O2_overridden", "O2", loss_scale="128.0", keep_batchnorm_fp32="False", master_weights=False)
options_case("options_O3_overridden", "O3", loss_scale="dynamic", keep_batchnorm_fp32=True)
options_case("options_O1_overridden", "O1", loss_scale=64, min_loss_scale=1.0, num_losses=3)
options_case("options_scale_True", "O2", loss_scale=True)


@case
def options_silent(amp: Any) -> None:
    start(amp, "O2", verbosity=0)


# What is given


@case
def data_parallel(amp: Any) -> None:
    amp.initialize(nn.DataParallel(model()), opt_level="O1", verbosity=0)


@case
def distributed_data_parallel(amp: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            amp.initialize(nn.parallel.DistributedDataParallel(model()), opt_level="O1", verbosity=0)
        finally:
            dist.destroy_process_group()


@case
def half_parameter(amp: Any) -> None:
    amp.initialize(model(HALF), opt_level="O2", verbosity=0)


@case
def half_parameter_inside(amp: Any) -> None:
    amp.initialize(nn.Sequential(model(), model(HALF)), opt_level="O1", verbosity=0)


@case
def half_buffer(amp: Any) -> None:
    net = model()
    net.register_buffer("level", torch.zeros(2, dtype=HALF))
    amp.initialize(net, opt_level="O2", verbosity=0)


@case
def cpu_parameter(amp: Any) -> None:
    amp.initialize(model(), opt_level="O2", verbosity=0)


@case
def cpu_buffer(amp: Any) -> None:
    net = nn.Module()
    net.register_buffer("level", torch.zeros(2))
    amp.initialize(net, opt_level="O2", verbosity=0)


@case
def half_parameter_allowed(amp: Any) -> str:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    net = amp.initialize(model(HALF), opt_level="O1", verbosity=0)
    return dtype_of(net.weight)


@case
def fp16_optimizer(amp: Any) -> None:
    name = f"{amp.__name__.rpartition('.')[0]}.fp16_utils"
    try:
        kind = importlib.import_module(name).FP16_Optimizer
    except ImportError:
        raise Absent from None
    amp.initialize(model(), [kind.__new__(kind)], opt_level="O2", verbosity=0)


@case
def optimizers_in_a_tuple(amp: Any) -> None:
    net = model()
    amp.initialize(net, (sgd(net),), opt_level="O2", verbosity=0)


@case
def optimizer_of_another_kind(amp: Any) -> None:
    amp.initialize(model(), "sgd", opt_level="O2", verbosity=0)


@case
def models_in_a_tuple(amp: Any) -> None:
    amp.initialize((model(),), opt_level="O2", verbosity=0)


@case
def model_of_another_kind(amp: Any) -> None:
    amp.initialize(torch.zeros(2), opt_level="O2", verbosity=0)


@case
def second_initialize(amp: Any) -> None:
    net, optimizer = start(amp, "O0")
    amp.initialize(net, optimizer, opt_level="O0", verbosity=0)


@case
def second_initialize_at_o2(amp: Any) -> None:
    net, optimizer = start(amp, "O2")
    amp.initialize(net, optimizer, opt_level="O2", verbosity=0)


@case
def name_clash(amp: Any) -> None:
    net = model()
    optimizer = sgd(net)
    optimizer._amp_lazy_init = None  # type: ignore[attr-defined]
    amp.initialize(net, optimizer, opt_level="O2", verbosity=0)


@case
def double_model_at_o1(amp: Any) -> None:
    net = model(torch.float64)
    net, optimizer = amp.initialize(net, sgd(net), opt_level="O1", verbosity=0)
    with amp.scale_loss(net.weight.sum(), optimizer) as scaled:
        scaled.backward()


@case
def bf16_group_added_at_o2(amp: Any) -> None:
    _, optimizer = start(amp, "O2")
    optimizer.add_param_group({"params": model(torch.bfloat16).parameters()})


@case
def double_group_added_at_o0(amp: Any) -> None:
    _, optimizer = start(amp, "O0")
    optimizer.add_param_group({"params": model(torch.float64).parameters()})


@case
def group_in_a_set(amp: Any) -> None:
    _, optimizer = start(amp, "O2")
    optimizer.add_param_group({"params": set(model(HALF).parameters())})


@case
def group_no_dict(amp: Any) -> None:
    _, optimizer = start(amp, "O2")
    optimizer.add_param_group(list(model(HALF).parameters()))


# What comes back


def shape(given: Any) -> str:
    if isinstance(given, (tuple, list)):
        inside = ", ".join(shape(entry) for entry in given)
        return f"({inside})" if isinstance(given, tuple) else f"[{inside}]"
    return type(given).__name__


@case
def shapes_returned(amp: Any) -> list[str]:
    def given(models: Any, *optimizers: Any, **options: Any) -> str:
        return shape(amp.initialize(models, *optimizers, opt_level="O0", verbosity=0, **options))

    one, two = model(), model()
    return [
        given(one),
        given(one, sgd(one)),
        given(one, [sgd(one)]),
        given(one, [sgd(one), sgd(one)]),
        given([one, two]),
        given([one], sgd(one)),
        given([one, two], [sgd(one), sgd(two)]),
        given(one, []),
        given([one], []),
        given(one, enabled=False),
        given(one, sgd(one), enabled=False),
        given((one,), (sgd(one),), enabled=False),
    ]


@case
def same_objects_returned(amp: Any) -> list[bool]:
    models = [model()]
    optimizers = [sgd(*models)]
    first, second = models[0], optimizers[0]
    given = amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    return [given[0] is models, given[1] is optimizers, given[0][0] is first, given[1][0] is second]


class Says(nn.Module):
    """Returns what it is told to, in the dtype of its input."""

    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.made(x)


Pair = namedtuple("Pair", "first second")


class Custom:
    """An object with a method ``to``."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def to(self, dtype: torch.dtype) -> Custom:
        return Custom(self.held.to(dtype))


def outputs(amp: Any, made: Callable[[torch.Tensor], Any], level: str = "O2", **options: Any) -> Any:
    return amp.initialize(Says(made), opt_level=level, verbosity=0, **options)(torch.ones(2))


@case
def output_tensor(amp: Any) -> list[str]:
    seen: list[str] = []

    def made(x: torch.Tensor) -> torch.Tensor:
        seen.append(dtype_of(x))
        return x

    out = [dtype_of(outputs(amp, made, level)) for level in ("O0", "O1", "O2", "O3")]
    return [*seen, *out, dtype_of(outputs(amp, made, "O2", cast_model_outputs=torch.float64))]


@case
def output_containers(amp: Any) -> str:
    given = outputs(amp, lambda x: [x, (x, {"a": x}), "word", 3, None, torch.tensor([1])])
    return f"{shape(given)} {dtype_of(given[1][1]['a'])} {dtype_of(given[5])}"


@case
def output_ordered_dict(amp: Any) -> str:
    return shape(outputs(amp, lambda x: OrderedDict(a=x)))


@case
def output_named_tuple(amp: Any) -> str:
    return type(outputs(amp, lambda x: Pair(x, x))).__name__


@case
def output_with_to(amp: Any) -> str:
    return dtype_of(outputs(amp, Custom).held)


@case
def state_dict_dtypes(amp: Any) -> list[str]:
    found = []
    for level in ("O0", "O2", "O3"):
        net, _ = start(amp, level)
        found.append(f"{dtype_of(net.weight)} {dtype_of(net.state_dict()['weight'])}")
    return found


@case
def dtypes_at_o2(amp: Any) -> list[str]:
    layers = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)]
    layers += [nn.InstanceNorm1d(2, affine=True), nn.LayerNorm(2), nn.GroupNorm(1, 2)]
    net = nn.Sequential(*layers)
    amp.initialize(net, opt_level="O2", verbosity=0)
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return [f"{name} {dtype_of(tensor)}" for name, tensor in tensors]


@case
def groups_before_and_after(amp: Any) -> list[str]:
    _, optimizer = start(amp, "O2")
    before = dtype_of(optimizer.param_groups[0]["params"][0])
    optimizer.zero_grad()
    return [before, dtype_of(optimizer.param_groups[0]["params"][0])]
