"""Wrote the files scaler-VERSION.pt beside it, one of each release: checkpoints of a run with torch_npu's GradScaler.

    xamp emulate ascend -- python tests/data/torch_npu/make_states.py

To be run once in an environment of a release of torch that has a new torch_npu. It refuses to overwrite a file. Tensors
of the card can be loaded only where torch_npu is; scalers.json has the states of the scalers for everywhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
SCALERS = HERE / "scalers.json"
DYNAMIC = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
STEPS = 6
OVERFLOWS_AT = 1


def start(dynamic: bool) -> tuple[Any, Any, Any]:
    """A model with constant weights, its optimizer and torch_npu's scaler."""
    model: Any = nn.Linear(2, 1)
    model = model.npu()
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    options = DYNAMIC if dynamic else {"init_scale": 256.0, "dynamic": False}
    return model, torch.optim.Adam(model.parameters(), lr=2.0**-6), torch.npu.amp.GradScaler(**options)


def step(model: Any, optimizer: Any, scaler: Any, *, overflow: bool = False) -> None:
    optimizer.zero_grad()
    with torch.autocast("npu", dtype=torch.float16):
        loss = model(torch.ones(1, 2, device="npu")).float().square().sum()
    scaler.scale(loss * (1e30 if overflow else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def trained(dynamic: bool) -> tuple[Any, Any, Any]:
    run = start(dynamic)
    for number in range(STEPS):
        step(*run, overflow=dynamic and number == OVERFLOWS_AT)
    return run


def states(model: Any, optimizer: Any, scaler: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}


if __name__ == "__main__":
    import torch_npu

    path = HERE / f"scaler-{torch_npu.__version__.partition('+')[0]}.pt"
    if path.exists():
        raise SystemExit(f"{path.name} is there already")
    made = {name: states(*trained(name == "dynamic")) for name in ("dynamic", "static")}
    torch.save(made, path)
    scalers = json.loads(SCALERS.read_text(encoding="utf-8")) if SCALERS.is_file() else {}
    scalers[path.stem.partition("-")[2]] = {name: each["scaler"] for name, each in made.items()}
    SCALERS.write_text(json.dumps(scalers, indent=1) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size} bytes")
