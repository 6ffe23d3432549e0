"""Stand-ins of torch, Apex and xamp that write down what a script asks of them.

A script and its port, each executed on them, must leave the same record: a tensor that goes to a device, an optimizer
step, a scaled loss. They play a machine with CUDA devices, where ``xamp.device_type()`` is ``"cuda"``.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

__all__ = ["record"]

_MODULES = (
    *("torch", "torch.cuda", "torch.cuda.amp", "torch.amp", "torch.distributed", "torch.nn", "torch.backends"),
    *("torch.npu", "torch.npu.amp", "torch_npu", "torch_npu.npu", "torch_npu.npu.amp", "argparse"),
    *("apex", "apex.amp", "apex.parallel", "apex.optimizers"),
    *("xamp", "xamp.accel", "xamp.apex", "xamp.apex.parallel", "xamp.apex.optimizers"),
)
_PORTED = {
    "initialize",
    "scale_loss",
    "master_params",
    "state_dict",
    "load_state_dict",
    "float_function",
    "autocast",
    "GradScaler",
}


class _Device:
    """A device, equal to another of the same index."""

    def __init__(self, index: int | None) -> None:
        self.index, self.type = index, "cuda"

    def __repr__(self) -> str:
        return "<device>" if self.index is None else f"<device {self.index}>"

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def _device(given: Any = None, index: Any = None) -> Any:
    if given == "cpu":
        return "cpu"
    if isinstance(given, str):
        name, _, number = given.replace("npu", "cuda").partition(":")
        assert name == "cuda", given
        return _Device(int(number) if number else index)
    return given if isinstance(given, _Device) else _Device(given if index is None else index)


class _Recorder:
    """Writes down each call of anything below it."""

    def __init__(self, log: list[str], path: str) -> None:
        self._log, self._path = log, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(self._log, f"{self._path}.{name}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._path.endswith("is_available"):
            return True
        if self._path.endswith(("device_count", "current_device")):
            self._log.append(self._path)
            return 2
        shown = {name: value for name, value in sorted(named.items()) if (name, value) != ("dtype", None)}
        given = tuple(getattr(arg, "__name__", arg) for arg in args)
        self._log.append(f"{self._path} {given!r} {shown!r}")
        return args[0] if self._path.endswith("float_function") else _Recorder(self._log, f"{self._path}()")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> _Recorder:
        return self.to(_device(device), non_blocking)

    npu = cuda

    def to(self, device: Any, non_blocking: bool = False) -> _Recorder:
        self._log.append(f"{self._path} to {_device(device)!r} {non_blocking}")
        return self

    def __enter__(self) -> _Recorder:
        self._log.append(f"enter {self._path}")
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append(f"leave {self._path}")

    def __iter__(self) -> Any:
        return iter((_Tensor(self._log, "first"), _Tensor(self._log, "second")))

    def __repr__(self) -> str:
        return f"<{self._path}>"


class _Tensor:
    """Something that can be put on a device."""

    is_cuda = True

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.device = _Device(None)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> _Tensor:
        self._log.append(f"{self._name} to {_device(device)!r} {non_blocking}")
        return self

    npu = cuda

    def to(self, device: Any, non_blocking: bool = False) -> _Tensor:
        self._log.append(f"{self._name} to {_device(device)!r} {non_blocking}")
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(self._log, f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<{self._name}>"


def _amp(log: list[str], name: str) -> Any:
    """A function of apex.amp, torch.cuda.amp or xamp, under one name."""
    path = f"amp.{name}"
    if name != "initialize":
        return _Recorder(log, path)

    def initialize(models: Any, optimizers: Any = None, enabled: Any = True, level: Any = None, **named: Any) -> Any:
        level = named.pop("opt_level", None) or level or "O1"
        named.pop("combine_grad", None)
        log.append(f"{path} {models!r} {optimizers!r} {enabled} {level} {sorted(named.items())!r}")
        return models, optimizers

    return initialize


def _autocast(log: list[str]) -> Any:
    def autocast(device_type: str, dtype: Any = None, enabled: Any = True, cache_enabled: Any = None) -> Any:
        assert device_type == "cuda"
        words = {"dtype": dtype, "enabled": enabled, "cache_enabled": cache_enabled}
        defaults = {"dtype": None, "enabled": True, "cache_enabled": None}
        return _Recorder(log, "amp.autocast")(**{key: value for key, value in words.items() if value != defaults[key]})

    return autocast


def _modules(log: list[str]) -> dict[str, types.ModuleType]:
    modules = {name: types.ModuleType(name) for name in _MODULES}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    accel = _Recorder(log, "accel")
    for name in ("torch.cuda", "torch.npu", "torch_npu.npu", "xamp.accel"):
        modules[name].__getattr__ = lambda attribute: getattr(accel, attribute)  # type: ignore[method-assign]
    for name in ("apex.amp", "torch.cuda.amp", "torch.npu.amp", "torch_npu.npu.amp", "xamp"):
        for function in _PORTED:
            setattr(modules[name], function, _amp(log, function))
    for name in ("apex.parallel", "xamp.apex.parallel", "apex.optimizers", "xamp.apex.optimizers", "torch.distributed"):
        shown = name.removeprefix("xamp.")
        recorder = _Recorder(log, shown)
        modules[name].__getattr__ = lambda attribute, of=recorder: getattr(of, attribute)  # type: ignore[method-assign, misc]
    _fill(modules, log)
    return modules


def _fill(modules: dict[str, Any], log: list[str]) -> None:
    torch, xamp = modules["torch"], modules["xamp"]
    torch.__version__ = "2.0"
    torch.device = _device
    torch.autocast = modules["torch.amp"].autocast = _autocast(log)
    torch.zeros = lambda *_, device=None: _Tensor(log, "zeros").to(_device(device))
    torch.load = lambda path, map_location=None: log.append(f"load {_place(map_location)!r}")
    xamp.device, xamp.device_type = _device, lambda: "cuda"
    xamp.is_available, xamp.distributed_backend = lambda: True, lambda: "nccl"
    modules["torch.distributed"].init_process_group = lambda backend, **words: log.append(
        f"group {backend.replace('hccl', 'nccl')} {words!r}"
    )


class _Storage:
    def cuda(self, index: Any = None) -> Any:
        return _device(index)


def _place(map_location: Any) -> Any:
    found = map_location(_Storage(), "cuda:0") if callable(map_location) else map_location
    return _device(found) if isinstance(found, str) else found


def record(text: str) -> list[str]:
    """What a script asks of the stand-ins, in order; ``out`` are the values that it keeps."""
    log: list[str] = []
    modules = _modules(log)

    def load(name: str, values: Any = None, inside: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if name == "__future__":
            return __import__(name, fromlist=["annotations"])
        if name not in modules:
            raise ImportError(name)
        return modules[name] if wanted else modules[name.partition(".")[0]]

    out: list[Any] = []
    names: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": load},
        "__name__": "script",
        "keep": lambda value: out.append(repr(value).replace("npu", "cuda").replace("hccl", "nccl")),
        **{name: _Tensor(log, name) for name in ("x", "y", "net", "optimizer", "loss")},
    }
    exec(compile(text, "script", "exec"), names)
    return [*log, *(str(value) for value in out)]
