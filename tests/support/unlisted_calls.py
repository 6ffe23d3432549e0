"""A call of each overload that only a CPU's autocast lists, with tensors of one dtype on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CALLS"]

Call = Callable[[Callable[..., torch.Tensor]], tuple[Any, ...]]
KINDS = ("", "h", "i", "ih", "ir", "r")


def _matrix(*arguments: Any) -> Call:
    return lambda t: (t(3, 3), *arguments)


def _positive(t: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    return (t(2, 1, 1).abs() + 0.5,)


def _whole(t: Callable[..., torch.Tensor], *values: Any) -> torch.Tensor:
    return torch.tensor(values, device=t(1).device)


CALLS: dict[str, Call] = {
    **{f"fft_{kind}fft": lambda t: (t(3, 6),) for kind in KINDS},
    **{f"fft_{kind}fft{dims}": lambda t: (t(3, 6),) for kind in KINDS for dims in ("2", "n")},
    "_lu_with_info": _matrix(),
    "cholesky": _positive,
    "cholesky_inverse": _positive,
    "cholesky_solve": lambda t: (t(2, 1, 3), *_positive(t)),
    "ctc_loss.IntList": lambda t: (t(5, 2, 4), _whole(t, [1, 2], [2, 1]), [5, 5], [2, 2]),
    "ctc_loss.Tensor": lambda t: (t(5, 2, 4), _whole(t, [1, 2], [2, 1]), torch.tensor([5, 5]), torch.tensor([2, 2])),
    "geqrf": _matrix(),
    "inverse": _matrix(),
    "linalg_cholesky": _positive,
    "linalg_cholesky_ex": _positive,
    "linalg_cond": _matrix(),
    "linalg_cond.p_str": _matrix("fro"),
    "linalg_eig": _matrix(),
    "linalg_eigh": _matrix(),
    "linalg_eigvals": _matrix(),
    "linalg_eigvalsh": _matrix(),
    "linalg_householder_product": lambda t: (t(4, 3), t(3)),
    "linalg_inv": _matrix(),
    "linalg_inv_ex": _matrix(),
    "linalg_lstsq": lambda t: (t(4, 3), t(4, 2)),
    "linalg_matrix_rank": _matrix(1e-4),
    "linalg_matrix_rank.atol_rtol_float": _matrix(),
    "linalg_matrix_rank.atol_rtol_tensor": _matrix(),
    "linalg_matrix_rank.tol_tensor": lambda t: (t(3, 3), t(1).abs()[0]),
    "linalg_qr": _matrix(),
    "linalg_solve": lambda t: (t(3, 3), t(3, 2)),
    "linalg_svd": _matrix(False),
    "linalg_svdvals": _matrix(),
    "linalg_tensorinv": lambda t: (t(2, 3, 6), 2),
    "linalg_tensorsolve": lambda t: (t(2, 3, 6), t(2, 3)),
    "lu_solve": lambda t: (t(3, 2), t(3, 3), _whole(t, 1, 2, 3).to(torch.int32)),
    "nanquantile": lambda t: (t(3, 4), t(2).abs().clamp(max=1)),
    "nanquantile.scalar": _matrix(0.5),
    "orgqr": lambda t: (t(4, 3), t(3)),
    "ormqr": lambda t: (t(4, 3), t(3), t(4, 2)),
    "pinverse": _matrix(),
    "polar": lambda t: (t(3, 4), t(3, 4)),
    "qr": _matrix(),
    "quantile": lambda t: (t(3, 4), t(2).abs().clamp(max=1)),
    "quantile.scalar": _matrix(0.5),
    "stft": lambda t: (t(2, 32), 8, None, None, t(8), False, None, True),
    "stft.center": lambda t: (t(2, 32), 8, None, None, t(8), True, "constant", False, None, True),
    "svd": _matrix(),
    "triangular_solve": lambda t: (t(3, 2), t(3, 3)),
    "view_as_complex": lambda t: (t(3, 2),),
}
