"""Cases of ``apex_messages``: casts around functions, registration, and the interface before ``initialize``."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from apex_cases import HALF, backward, case, dtype_of, fresh, model, sgd, start
from torch import nn

F = nn.functional


# O1


@case
def promote_double(amp: Any) -> str:
    amp.init()
    return dtype_of(torch.add(torch.ones(2), torch.ones(2, dtype=torch.float64)))


@case
def promote_bf16_with_half(amp: Any) -> str:
    amp.init()
    return dtype_of(torch.ones(2, dtype=HALF) * torch.ones(2, dtype=torch.bfloat16))


@case
def in_place_method(amp: Any) -> None:
    amp.init()
    torch.ones(2, dtype=HALF).exp_()


@case
def in_place_power(amp: Any) -> None:
    amp.init()
    torch.ones(2, dtype=HALF).pow_(2)


@case
def in_place_function(amp: Any) -> None:
    amp.init()
    torch.reciprocal_(torch.ones(2, dtype=HALF))


@case
def in_place_with_casts_disabled(amp: Any) -> None:
    amp.init()
    with amp.disable_casts():
        torch.ones(2, dtype=HALF).exp_()


@case
def banned(amp: Any) -> None:
    amp.init()
    F.binary_cross_entropy(torch.full((2,), 0.5, dtype=HALF), torch.ones(2))


@case
def banned_in_fp32(amp: Any) -> str:
    amp.init()
    return dtype_of(F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2)))


@case
def banned_allowed(amp: Any) -> str:
    amp.init(allow_banned=True)
    return dtype_of(F.binary_cross_entropy(torch.full((2,), 0.5, dtype=HALF), torch.ones(2)))


@case
def cache_of_another(amp: Any) -> None:
    """A cache entry whose parent is another weight."""
    handle = amp.init()
    one, two = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    handle.cache[one] = two.half()
    F.linear(torch.ones(1, 2), one)


@case
def verbose_casts(amp: Any) -> None:
    amp.init(verbose=True)
    weight = nn.Parameter(torch.ones(2, 2))
    F.linear(torch.ones(1, 2), weight)
    F.linear(torch.ones(1, 2, dtype=HALF), weight)
    torch.exp(torch.ones(2, dtype=HALF))
    torch.ones(2, dtype=HALF).sum()
    torch.ones(2, dtype=HALF) + torch.ones(2)
    torch.cat([torch.ones(2, dtype=HALF), torch.ones(2)])
    torch.ones(2, dtype=HALF).add_(torch.ones(2))


@case
def verbosity_2(amp: Any) -> None:
    net, optimizer = start(amp, "O1", verbosity=2)
    print("--")
    optimizer.zero_grad()
    backward(amp, net, optimizer)
    optimizer.step()


@case
def cache_counts(amp: Any) -> list[int]:
    """The number of cache entries after a pass in evaluation, in training, and after ``scale_loss``."""
    net, optimizer = start(amp, "O1")
    handle = amp._amp_state.handle
    with torch.no_grad():
        net(torch.ones(1, 2))
    found = [len(handle.cache)]
    loss = net(torch.ones(1, 2)).sum()
    found.append(len(handle.cache))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    return [*found, len(handle.cache)]


@fresh
def disable_casts_before_initialize(amp: Any) -> None:
    with amp.disable_casts():
        pass


@case
def disable_casts(amp: Any) -> list[str]:
    amp.init()
    a = torch.ones(2, 2)
    before = dtype_of(a @ a)
    with amp.disable_casts():
        inside = dtype_of(a @ a)
    return [before, inside, dtype_of(a @ a)]


@case
def disable_casts_and_an_error(amp: Any) -> str:
    amp.init()
    with contextlib.suppress(KeyError), amp.disable_casts():
        raise KeyError
    return dtype_of(torch.ones(2, 2) @ torch.ones(2, 2))


# Registration


def tools() -> Any:
    """A module with functions that return the dtypes of their arguments."""
    made: Any = types.ModuleType("tools")

    def told(*args: Any, **kwargs: Any) -> list[str]:
        flat: list[Any] = []
        for entry in (*args, *kwargs.values()):
            flat += entry if isinstance(entry, (list, tuple)) else [entry]
        return [dtype_of(entry) if isinstance(entry, torch.Tensor) else type(entry).__name__ for entry in flat]

    made.told = told
    return made


ONES = torch.ones(2)
HALVES = torch.ones(2, dtype=HALF)


@case
def register_half_missing(amp: Any) -> None:
    amp.register_half_function(tools(), "gone")


@case
def register_float_missing(amp: Any) -> None:
    amp.register_float_function(tools(), "gone")


@case
def register_promote_missing(amp: Any) -> None:
    amp.register_promote_function(tools(), "gone")


@case
def registered(amp: Any) -> list[Any]:
    """Each kind of registration, called before the next init, during it, and in the one after it."""
    found = []
    for kind in ("half", "float", "promote"):
        module = tools()
        getattr(amp, f"register_{kind}_function")(module, "told")
        found.append(module.told(ONES, HALVES))
        handle = amp.init()
        found.append(module.told(ONES, HALVES, 3, [ONES, HALVES], key=HALVES, other=(ONES,)))
        handle._deactivate()
        handle = amp.init()
        found.append(module.told(ONES, HALVES))
        handle._deactivate()
    return found


@case
def decorated(amp: Any) -> list[Any]:
    """Each kind of registration, called before an init and during it."""
    found = []
    for kind in ("half", "float", "promote"):
        amp.init(enabled=False)
        function = getattr(amp, f"{kind}_function")(tools().told)
        found.append(function(ONES, HALVES))
        handle = amp.init()
        found.append(function(ONES, HALVES, 3, [ONES, HALVES], key=HALVES))
        with amp.disable_casts():
            found.append(function(ONES, HALVES))
        handle._deactivate()
    return found


@case
def registered_under_a_list(amp: Any) -> str:
    """A user's registration is the inner cast: the cast by Apex's list for torch's functions runs before it."""
    original = torch.mm
    amp.register_float_function(torch, "mm")
    handle = amp.init()
    try:
        return dtype_of(torch.mm(torch.ones(2, 2), torch.ones(2, 2)))
    finally:
        handle._deactivate()
        torch.mm = original


# The interface before initialize


@case
def handle_properties(amp: Any) -> list[Any]:
    found = []
    for options in ({}, {"enable_caching": False}, {"verbose": True}, {"enabled": False}):
        handle = amp.init(**options)
        found.append([handle.is_active(), handle.has_cache, handle.verbose])
        handle._deactivate()
    return found


@case
def handle_scale_loss(amp: Any) -> None:
    handle = amp.init()
    with handle.scale_loss(torch.ones(()), sgd(model())):
        pass


@case
def handle_off_scale_loss(amp: Any) -> bool:
    handle = amp.init(enabled=False)
    loss = torch.ones(())
    with handle.scale_loss(loss, sgd(model())) as scaled:
        return scaled is loss


@case
def wrapped_optimizer(amp: Any) -> None:
    net = model()
    optimizer = amp.init().wrap_optimizer(sgd(net))
    with optimizer.scale_loss(net(torch.ones(1, 2)).sum()) as scaled:
        scaled.backward()
    optimizer.step()


@case
def wrapped_optimizer_closure(amp: Any) -> None:
    amp.init().wrap_optimizer(sgd(model())).step(lambda: None)


@case
def cast_after_deactivation(amp: Any) -> list[str]:
    handle = amp.init()
    a = torch.ones(2, 2)
    during = dtype_of(a.mm(a))
    handle._deactivate()
    return [during, dtype_of(a.mm(a)), dtype_of(torch.mm(a, a))]
