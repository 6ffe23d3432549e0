"""Cases of ``apex_messages``: ``scale_loss``, the optimizer's methods, the states of the scalers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from apex_cases import HALF, backward, case, dtype_of, fresh, model, quiet, sgd, start

# scale_loss and the step


@fresh
def scale_loss_before_initialize(amp: Any) -> None:
    net = model()
    backward(amp, net, sgd(net))


@case
def loss_id_out_of_range(amp: Any) -> None:
    net, optimizer = start(amp, "O2", num_losses=2)
    backward(amp, net, optimizer, loss_id=2)


@case
def closure(amp: Any) -> None:
    net, optimizer = start(amp, "O2")
    optimizer.zero_grad()
    backward(amp, net, optimizer)
    optimizer.step(lambda: None)


@case
def closure_on_a_skipped_step(amp: Any) -> None:
    net, optimizer = start(amp, "O0", loss_scale="dynamic")
    backward(amp, net, optimizer, float("inf"))
    optimizer.step(lambda: None)


@case
def zero_grad_set_to_none(amp: Any) -> None:
    _, optimizer = start(amp, "O2")
    optimizer.zero_grad(set_to_none=True)


@case
def step_before_backward(amp: Any) -> None:
    _, optimizer = start(amp, "O2")
    optimizer.step()


def overflow(amp: Any, level: str, times: int = 2, **options: Any) -> list[float]:
    net, optimizer = start(amp, level, loss_scale="dynamic", verbosity=1, num_losses=2, **options)
    print("--")
    for _ in range(times):
        backward(amp, net, optimizer)
        backward(amp, net, optimizer, float("inf"), loss_id=1)
        optimizer.step()
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


@case
def overflow_o0(amp: Any) -> list[float]:
    return overflow(amp, "O0")


@case
def overflow_o1(amp: Any) -> list[float]:
    return overflow(amp, "O1")


@case
def overflow_o2(amp: Any) -> list[float]:
    return overflow(amp, "O2")


@case
def overflow_o3(amp: Any) -> list[float]:
    return overflow(amp, "O3")


@case
def overflow_at_the_floor(amp: Any) -> list[float]:
    return overflow(amp, "O2", 3, min_loss_scale=32768.0)


@case
def overflow_silent(amp: Any) -> list[float]:
    net, optimizer = start(amp, "O2", verbosity=0)
    backward(amp, net, optimizer, float("inf"))
    optimizer.step()
    return [entry["loss_scale"] for entry in amp.state_dict().values()]


@case
def scale_slides_to_nothing(amp: Any) -> float:
    net, optimizer = start(amp, "O0", loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**-1074, "unskipped": 0}})
    backward(amp, net, optimizer, float("inf"))
    optimizer.step()
    backward(amp, net, optimizer)
    return float(amp.state_dict()["loss_scaler0"]["loss_scale"])


@case
def overflow_unchecked(amp: Any) -> list[Any]:
    """With ``delay_overflow_check`` an overflow affects neither the scale nor the step."""
    net, optimizer = start(amp, "O2")
    optimizer.zero_grad()
    backward(amp, net, optimizer, float("inf"), delay_overflow_check=True)
    return [amp.state_dict()["loss_scaler0"]["loss_scale"], amp.state_dict()["loss_scaler0"]["unskipped"]]


@case
def scaled_loss_values(amp: Any) -> list[str]:
    """For each level, the factor and the dtype of the scaled loss that ``scale_loss`` gives for an fp16 loss."""
    found = []
    for level in ("O0", "O1", "O2", "O3"):
        _, optimizer = start(amp, level)
        with amp.scale_loss(torch.ones((), dtype=HALF, requires_grad=True), optimizer) as scaled:
            found.append(f"{float(scaled.detach())} {dtype_of(scaled)}")
        quiet(amp)
    return found


@case
def switched_off(amp: Any) -> list[bool]:
    net = model()
    net, optimizer = amp.initialize(net, sgd(net), opt_level="O2", enabled=False)
    loss = net(torch.ones(1, 2)).sum().half()
    with amp.scale_loss(loss, optimizer) as scaled:
        return [scaled is loss]


@case
def switched_off_state_dict(amp: Any) -> Any:
    for name in ("loss_scalers",):  # as in a process that initialized nothing else
        if hasattr(amp._amp_state, name):
            delattr(amp._amp_state, name)
    net = model()
    amp.initialize(net, sgd(net), opt_level="O2", enabled=False)
    return amp.state_dict()


@fresh
def unscale_of_fp16_gradients(amp: Any) -> None:
    net, optimizer = start(amp, "O3", loss_scale=128.0, verbosity=1)
    print("--")
    backward(amp, net, optimizer)


@fresh
def no_fused_kernel(amp: Any) -> None:
    start(amp, "O3", verbosity=1)


# Checkpoints


STATE = {"loss_scale": 1024.0, "unskipped": 5}


@case
def state_dict_content(amp: Any) -> Any:
    net, optimizer = start(amp, "O2", num_losses=2, loss_scale="dynamic")
    optimizer.zero_grad()
    backward(amp, net, optimizer, loss_id=1)
    found = amp.state_dict()
    return [type(found).__name__, dict(found)]


@case
def state_dict_destination(amp: Any) -> Any:
    start(amp, "O2")
    destination = {"other": 1}
    return [amp.state_dict(destination) is destination, destination]


@case
def fewer_states(amp: Any) -> Any:
    start(amp, "O2", num_losses=3)
    amp.load_state_dict({"loss_scaler0": STATE})
    return dict(amp.state_dict())


@case
def more_states(amp: Any) -> Any:
    start(amp, "O2", num_losses=2)
    amp.load_state_dict({f"loss_scaler{index}": dict(STATE, unskipped=index) for index in range(4)})
    return dict(amp.state_dict())


@case
def states_by_position(amp: Any) -> Any:
    start(amp, "O2", num_losses=2)
    amp.load_state_dict(OrderedDict(loss_scaler1=dict(STATE, unskipped=1), loss_scaler0=dict(STATE, unskipped=0)))
    return dict(amp.state_dict())


@case
def unexpected_states(amp: Any) -> None:
    start(amp, "O2", num_losses=2)
    amp.load_state_dict(OrderedDict(foo=1, loss_scaler0=STATE, bar=2))


@fresh
def state_dict_before_initialize(amp: Any) -> Any:
    return amp.state_dict()
