"""What is redirected, as data: names of torch, how each is handled, and what to write in its place when porting.

A row is an owner, its names and a handler: a function of ``handlers``, ``casts`` or ``ranks``. What is in no row of
these tables is left as it is, and so is the truth that torch tells: ``is_available()``, ``device_count()``,
``is_cuda``, ``type()``, ``torch.version.cuda``. torch.accelerator answers by itself where its accelerator is the device
in use.
"""

from __future__ import annotations

from typing import NamedTuple

from xamp.torch_compat.torch_private.originals import DEVICE_CONTEXT, STORAGE_BASE
from xamp.values.accel_names import CLASSES, DEVICES, MEMORY, NVTX, RANDOM, STREAMS

__all__ = ["ACCELERATOR", "ANSWERED", "ASKED", "ASKED_OF_ACCELERATOR", "REFUSED", "ROWS", "TENSOR_TYPES", "Row"]


class Row(NamedTuple):
    """Names of one owner that are handled alike.

    Attributes:
        owner: the module or class, ``"module"`` or ``"module:Class"``, as ``pkgutil.resolve_name`` takes it.
        names: its attributes.
        handler: the function that makes what is put in their place.
        port: what to write in a port.
    """

    owner: str
    names: tuple[str, ...]
    handler: str
    port: str = ""


_FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_quantized",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "new")
_DTYPES = ("half", "float", "double", "bfloat16", "bool", "byte", "char", "int", "long", "short")
_WITH_FORMAT = ("contiguous", "clone", "cpu", *_DTYPES)
_DEVICE = "device=xamp.device()"

ROWS = (
    Row("torch:Tensor", ("cuda",), "move", ".to(xamp.device())"),
    Row("torch.nn:Module", ("cuda",), "move_module", ".to(xamp.device())"),
    Row(STORAGE_BASE, ("cuda",), "move_storage", "map_location=xamp.device()"),
    Row("torch.storage:TypedStorage", ("cuda",), "move_storage", "map_location=xamp.device()"),
    Row("torch:Tensor", ("to",), "device_argument", ".to(xamp.device())"),
    Row("torch.nn:Module", ("to", "to_empty"), "device_argument", ".to(xamp.device())"),
    Row(STORAGE_BASE, ("to",), "device_argument", _DEVICE),
    Row("torch.storage:TypedStorage", ("to",), "device_argument", _DEVICE),
    Row("torch:Tensor", _NEW, "device_argument", _DEVICE),
    Row("torch", _FACTORIES, "device_argument", _DEVICE),
    Row("torch.fft", ("fftfreq", "rfftfreq"), "device_argument", _DEVICE),
    Row("torch.nested", ("nested_tensor", "as_nested_tensor"), "device_argument", _DEVICE),
    Row("torch", ("set_default_device",), "device_argument", "torch.set_default_device(xamp.device())"),
    Row(DEVICE_CONTEXT, ("__init__",), "device_argument", "with xamp.device():"),
    Row("torch:Tensor", _WITH_FORMAT, "memory_format_argument", "memory_format=xamp.accel.channels_last"),
    Row("torch", ("clone",), "memory_format_argument", "memory_format=xamp.accel.channels_last"),
    Row("torch:Tensor", ("type",), "tensor_type_argument", ".to(xamp.device(), dtype)"),
    Row("torch", ("set_default_tensor_type",), "default_tensor_type", "torch.set_default_device(xamp.device())"),
    Row("torch:Tensor", ("pin_memory",), "pin", "x if xamp.device_type() == 'cpu' else x.pin_memory()"),
    Row("torch.serialization", ("load",), "load", "map_location=xamp.device()"),
    Row("torch.jit", ("load",), "jit_load", "map_location=xamp.device()"),
    Row("torch", ("Generator",), "generator", "torch.Generator(device=xamp.device())"),
    Row("torch.amp.autocast_mode:autocast", ("__init__",), "autocast", "xamp.autocast()"),
    Row("torch.amp.autocast_mode:autocast", ("__enter__",), "enter_autocast"),
    Row("torch.amp.autocast_mode:autocast", ("__exit__",), "leave_autocast"),
    Row("torch.amp.autocast_mode", ("custom_fwd", "custom_bwd"), "type_argument", "xamp.custom_fwd, xamp.custom_bwd"),
    Row("torch", ("is_autocast_enabled", "get_autocast_dtype"), "autocast_state", "device_type=xamp.device_type()"),
    Row("torch", ("get_autocast_gpu_dtype",), "autocast_gpu_dtype", "torch.get_autocast_dtype(xamp.device_type())"),
    Row("torch.amp.grad_scaler:GradScaler", ("__init__",), "grad_scaler", "xamp.GradScaler()"),
    Row("torch.utils.data:DataLoader", ("__init__",), "loader", ""),
    Row("torch.distributed.distributed_c10d", ("init_process_group",), "init_group", "xamp.distributed_backend()"),
    Row("torch.distributed.distributed_c10d", ("new_group",), "new_group", "xamp.distributed_backend()"),
    Row("torch.distributed.device_mesh", ("init_device_mesh",), "type_argument", "xamp.device_type()"),
    Row("torch.nn.parallel.data_parallel", ("_get_available_device_type",), "data_parallel", ""),
    Row("torch.nn.parallel:DistributedDataParallel", ("__init__",), "wrap_ddp", "leave device_ids out"),
    Row("torch.nn.parallel:DistributedDataParallel", ("_passing_sync_batchnorm_handle",), "accept_sync_batch_norm", ""),
    Row("torch.nn:SyncBatchNorm", ("forward",), "sync_batch_norm", ""),
)

ANSWERED = {"functions": (*DEVICES, *STREAMS, *RANDOM, *MEMORY), "classes": CLASSES, "nvtx": NVTX}
"""Names of torch.cuda (or torch.npu) that :mod:`xamp.accel` answers; ``nvtx`` are those of torch.cuda.nvtx."""

ASKED = ("is_available", "device_count", "is_bf16_supported")
"""Questions that are answered truthfully, unless the user asks to pretend."""

ACCELERATOR = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "device_index": "device",
    "get_memory_info": "mem_get_info",
    "get_device_capability": "get_device_capability",
    "empty_host_cache": "empty_cache",
    **{
        name: name
        for name in (
            *("current_stream", "set_stream", "synchronize", "empty_cache", "max_memory_allocated"),
            *("max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats"),
            *("reset_accumulated_memory_stats", "reset_peak_memory_stats"),
        )
    },
}
"""Names of torch.accelerator, and the name of :mod:`xamp.accel` that answers where torch's accelerator is another."""

ASKED_OF_ACCELERATOR = ("is_available", "device_count", "current_accelerator")
"""Questions of torch.accelerator that are answered truthfully, unless the user asks to pretend."""

_PROPERTIES = "what the device is like is no question for a stand-in; a port asks xamp.accel.{name}()"
_GRAPHS = "CUDA graphs are captured and replayed by CUDA only; take them out, or guard them by xamp.device_type()"
_ONLY_CUDA = "only a CUDA driver knows; take it out, or guard it by xamp.device_type()"
REFUSED = {
    **dict.fromkeys(
        ("get_device_properties", "get_device_capability", "get_arch_list", "get_gencode_flags"), _PROPERTIES
    ),
    **dict.fromkeys(("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle"), _GRAPHS),
    **dict.fromkeys(
        ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage", "list_gpu_processes"), _ONLY_CUDA
    ),
    **dict.fromkeys(("caching_allocator_alloc", "caching_allocator_delete", "MemPool", "use_mem_pool"), _ONLY_CUDA),
    "cudart": "start and stop a profile with torch.profiler.profile(); wait with xamp.accel.synchronize()",
}
"""Names of torch.cuda that nothing can answer on another device, and what to do."""

TENSOR_TYPES = {
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "HalfTensor": "float16",
    "BFloat16Tensor": "bfloat16",
    "ByteTensor": "uint8",
    "CharTensor": "int8",
    "ShortTensor": "int16",
    "IntTensor": "int32",
    "LongTensor": "int64",
    "BoolTensor": "bool",
}
"""Legacy types of tensors, and their dtypes."""
