"""What torch does in C++ for the devices that it knows: modules keep their parameters when they move there."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["install"]


def install(name: str) -> None:
    """Let parameters move to the device ``name`` as they do to others, and one device take what is scattered."""
    _keep_parameters(name)
    if not hasattr(torch._C, "_scatter"):  # of builds for a GPU
        torch._C._scatter = _scatter


def _keep_parameters(name: str) -> None:
    """Let ``parameter.data = tensor`` change the device: torch's own setter refuses a tensor of a foreign kind."""
    compatible, plain = torch._has_compatible_shallow_copy_type, torch.Tensor.data
    kinds = {"cpu", name}

    def moves(tensor: torch.Tensor, moved: torch.Tensor) -> bool:
        return {tensor.device.type, moved.device.type} == kinds and not (tensor.is_sparse or moved.is_sparse)

    def set_data(param: torch.nn.Parameter, value: torch.Tensor) -> None:
        if not moves(param, value):
            plain.__set__(param, value)  # type: ignore[attr-defined]
            return
        made = torch.nn.Parameter(value, param.requires_grad)
        torch._C._swap_tensor_impl(param, made)

    def shallow(input: torch.Tensor, from_: torch.Tensor) -> bool:
        return compatible(input, from_) or (isinstance(input, torch.nn.Parameter) and moves(input, from_))

    # The compiler compares the signature with that of what it traces in its place.
    shallow.__annotations__ = {"input": torch.Tensor, "from_": torch.Tensor, "return": bool}
    torch._has_compatible_shallow_copy_type = shallow
    torch.nn.Parameter.data = property(plain.__get__, set_data)  # type: ignore[assignment, attr-defined]


def _scatter(tensor: torch.Tensor, devices: list[int], chunk_sizes: Any, dim: int, streams: Any) -> list[torch.Tensor]:
    return [part.to(torch.accelerator.current_accelerator()) for part in tensor.chunk(len(devices), dim)]
