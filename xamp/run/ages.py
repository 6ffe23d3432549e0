"""Explains faults of a script that come from its age: what torch, torchvision, numpy or Python have removed since.

The fault itself is shown as ever; the explanation follows it. A rule is a type, a pattern of the message and a text.
Where new scripts may meet the same message, the line that failed, or its file, must be of the rule's kind too.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["REMOVED", "explain"]

REMOVED = {
    "torch._six": "string classes: (str, bytes); inf: math.inf; container_abcs: collections.abc",
    "torch.utils.ffi": "build the extension with torch.utils.cpp_extension",
    "torch.gels": "torch.linalg.lstsq(A, B), arguments in this order",
    "torch.gesv": "torch.linalg.solve(A, B), arguments in this order",
    "torch.trtrs": "torch.linalg.solve_triangular",
    "torch.potrf": "torch.linalg.cholesky",
    "torch.potri": "torch.cholesky_inverse",
    "torch.potrs": "torch.cholesky_solve",
    "torch.pstrf": "torch.linalg.cholesky",
    "torch.btrifact": "torch.linalg.lu_factor",
    "torch.btrisolve": "torch.linalg.lu_solve",
    "torch.rfft": "torch.fft.rfft (another layout: complex numbers)",
    "torch.irfft": "torch.fft.irfft (another layout: complex numbers)",
    "torch.ifft": "torch.fft.ifft (another layout: complex numbers)",
    "torch.Tensor.lu": "torch.linalg.lu",
    "torch.nn._VF": "torch._VF",
    "torch.nn._functions": "torch.nn.functional",
    "torch.distributed.deprecated": "torch.distributed",
    "torch.legacy": "torch.nn",
    "torch.utils.data.dataloader.numpy_type_map": "torch.utils.data.default_collate",
    "torch.utils.data._utils.collate.string_classes": "str",
    "torch.onnx.set_training": "model.train()",
    "torch.onnx.OperatorExportTypes.ONNX_ATEN": "torch.onnx.export(dynamo=True)",
    "torch.jit.get_trace_graph": "torch.jit.trace",
    "torchvision.transforms.Scale": "torchvision.transforms.Resize",
    "torchvision.transforms.RandomSizedCrop": "torchvision.transforms.RandomResizedCrop",
    "torchvision.transforms.functional_tensor": "torchvision.transforms.functional",
    "torchvision.models.utils": "torch.hub",
    "torchvision.models.utils.load_state_dict_from_url": "torch.hub.load_state_dict_from_url",
    "torchvision.models.resnet.model_urls": "torchvision.models.ResNet50_Weights",
    "torchvision._internally_replaced_utils": "torch.hub",
    "torchvision.ops._new_empty_tensor": "torch.empty",
    "torchvision.ops.misc.ConvTranspose2d": "torch.nn.ConvTranspose2d",
    "torchtext.data.Field": "a vocabulary of your own: the package is no longer developed",
    "torchtext.data.BucketIterator": "torch.utils.data.DataLoader: the package is no longer developed",
    "numpy.int": "int",
    "numpy.float": "float",
    "numpy.bool": "bool",
    "numpy.object": "object",
    "numpy.str": "str",
    "numpy.complex": "complex",
    "numpy.long": "int",
    "numpy.product": "numpy.prod",
    "numpy.float_": "numpy.float64",
    "numpy.Inf": "numpy.inf",
    "numpy.NaN": "numpy.nan",
    "collections.Iterable": "collections.abc.Iterable",
    "collections.Mapping": "collections.abc.Mapping",
    "collections.Sequence": "collections.abc.Sequence",
    "collections.Callable": "collections.abc.Callable",
    "collections.MutableMapping": "collections.abc.MutableMapping",
    "inspect.getargspec": "inspect.getfullargspec",
    "time.clock": "time.perf_counter",
    "fractions.gcd": "math.gcd",
    "imp": "importlib",
    "distutils": "setuptools, or shutil and packaging.version",
    "scipy.misc.imread": "imageio.imread",
    "scipy.misc.imresize": "PIL.Image.resize",
    "scipy.misc.imsave": "imageio.imwrite",
    "scipy.misc.logsumexp": "scipy.special.logsumexp",
    "PIL.Image.ANTIALIAS": "PIL.Image.LANCZOS",
    "PIL.Image.LINEAR": "PIL.Image.BILINEAR",
    "sklearn.externals": "import joblib or six itself",
    "sklearn.cross_validation": "sklearn.model_selection",
    "tensorboardX": "torch.utils.tensorboard",
    "transformers.AdamW": "torch.optim.AdamW",
    "pytorch_transformers": "transformers",
    "pytorch_pretrained_bert": "transformers",
    "torch_npu.utils.profiler": "torch_npu.profiler",
}
"""Names that newer versions do not have, and what took their place."""


class _Rule(NamedTuple):
    """One explanation.

    Attributes:
        kind: the types of exceptions.
        pattern: of the message.
        text: what is said.
        line: a pattern of the line that failed, in the script or a library of its; empty: any line.
        file: a pattern of that line's file.
        of_bools: what ``.view`` was called on, as far as a name tells, must be a tensor of bools.
    """

    kind: str
    pattern: str
    text: str
    line: str = ""
    file: str = ""
    of_bools: bool = False


_RULES = (
    _Rule(
        "RuntimeError",
        r"result type Float can't be cast to the desired output type Long|Found dtype Long but expected",
        "until torch 1.6, torch.full() of an int made a float tensor; now it is an integer one. Write 1.0 and 0.0, or "
        "dtype=torch.float",
        file=r"\bfull(_like)?\(",
    ),
    _Rule(
        "RuntimeError",
        r"deprecated since version .* and is now removed",
        "torch has removed this function; its message names the one that took its place",
    ),
    _Rule(
        "RuntimeError",
        r"view size is not compatible with input tensor's size and stride",
        "since torch 1.7 comparisons of transposed tensors keep the transposed layout (correct[:k].view(-1) of "
        "accuracy functions). Write .reshape(...) for .view(...)",
        line=r"\.view\(",
        of_bools=True,
    ),
    _Rule(
        "IndexError",
        r"invalid index of a 0-dim tensor",
        "since torch 0.5 a loss has no dimension. Write loss.item() for loss.data[0]",
        line=r"\[0\]",
    ),
    _Rule(
        "RuntimeError",
        r"Legacy autograd function with non-static forward method",
        "since torch 1.5 forward and backward of an autograd.Function are static methods that take ctx",
    ),
    _Rule(
        "(RuntimeError|TypeError)",
        r"(masked_\w+|mask).*(Byte|byte|uint8|unsigned char)|only supports boolean masks",
        "masks are bool now. Write mask.bool()",
    ),
    _Rule(
        "RuntimeError",
        r"Subtraction, the `-` operator, with (a|two) bool",
        "comparisons give bool tensors since torch 1.2, and 1 - mask is an error. Write ~mask",
    ),
    _Rule(
        "RuntimeError",
        r"(nll_loss|cross_entropy|index|scatter|gather|one_hot|embedding).*Int\b|expected scalar type Long but"
        r" found Int|Long or Byte, but got Int|"
        r"expected (a )?(dtype )?int64|Expected.*Long.*Int",
        "labels and indices in int32, a habit of Ascend scripts, are int64 elsewhere. Write .long()",
    ),
    _Rule(
        "AttributeError",
        r"DataLoaderIter' object has no attribute 'next'",
        "iterators of a DataLoader have no method next any more. Write next(iterator)",
    ),
    _Rule(
        "TypeError",
        r"(add|addcmul|addcdiv|sub|addmm|baddbmm|addbmm|addmv|addr)_?\(\).*(Number|float|int).*Tensor",
        "the order add_(number, tensor) is gone. Write add_(tensor, alpha=number), addcmul_(a, b, value=number), "
        "addcdiv_(a, b, value=number)",
    ),
    _Rule(
        "(UnpicklingError|RuntimeError)",
        r"Weights only load failed|weights_only",
        "since torch 2.6, torch.load() reads nothing but tensors and plain values. For a file that you trust: "
        "torch.load(..., weights_only=False)",
    ),
    _Rule(
        "(ValueError|RuntimeError)",
        r"elementwise\w* is not a valid value for reduction|elementwise_mean",
        "reduction='elementwise_mean' was torch 0.4's name. Write reduction='mean'",
    ),
    _Rule(
        "TypeError", r"got an unexpected keyword argument '(async|is_async)'", "write non_blocking=True for async=True"
    ),
    _Rule(
        "TypeError",
        r"load\(\) missing 1 required positional argument: 'Loader'",
        "yaml.load(f) needs a loader now. Write yaml.safe_load(f)",
    ),
    _Rule(
        "TypeError",
        r"unexpected keyword argument '(pretrained|aux_logits|transform_input)'",
        "torchvision models take weights=... now",
        file=r"\btorchvision\b",
    ),
    _Rule(
        "TypeError",
        r"(LR\w*|Scheduler\w*)\.__init__\(\).*unexpected keyword argument 'verbose'",
        "schedulers take no verbose any more; leave it out",
    ),
    _Rule(
        "TypeError",
        r"unexpected keyword argument '(resample|fillcolor|range)'",
        "torchvision renamed resample to interpolation, fillcolor to fill, "
        "range (of save_image, make_grid) to value_range",
        file=r"\btorchvision\b",
    ),
    _Rule(
        "TypeError",
        r"unexpected keyword argument 'size_average'|(?i:loss|entropy)\w*(\.__init__)?\(\).*keyword argument 'reduce'",
        "size_average and reduce became reduction='mean', 'sum' or 'none'",
    ),
    _Rule(
        "SyntaxError",
        r"Missing parentheses in call to 'print'|multiple exception types must be|exec'",
        "this is Python 2. Convert the script, for example with 2to3 of Python 3.11 or older",
    ),
    _Rule(
        "SyntaxError",
        r"invalid syntax(?s:.*)\basync\b",
        "async is a word of the language since Python 3.7. Write non_blocking=True for async=True",
    ),
    _Rule(
        "RuntimeError",
        r"a view of a leaf Variable that requires grad is being used in an in-place operation|"
        r"a leaf Variable that requires grad .*in-place",
        "weights are changed in place under torch.no_grad() now",
    ),
    _Rule(
        "RuntimeError",
        r"one of the variables needed for gradient computation has been modified by an inplace operation",
        "since torch 1.5 optimizer.step() counts as such a change: step after the last backward that needs the weights",
        line=r"backward\(|autograd\.grad\(",
        file=r"\.step\((?s:.*)\.step\(",
    ),
)

_NOT_REDIRECTED = (
    _Rule(
        "(OSError|EnvironmentError)",
        r"CUDA_HOME environment variable is not set",
        "a CUDA extension is being built. It runs on CUDA only: take the operator from torch or torchvision.ops, or "
        "write it with torch's own operators",
    ),
    _Rule(
        "(ModuleNotFoundError|ImportError)",
        r"No module named '[^']*(cuda|_ext|_C|gpu)[^']*'",
        "this may be a CUDA extension that the project builds. It runs on CUDA only: take the operator from torch or "
        "torchvision.ops, or write it with torch's own operators",
    ),
    _Rule(
        "(ModuleNotFoundError|ImportError)",
        r"No module named '(nvidia|cupy|pycuda|tensorrt|numba\.cuda)",
        "this library works with CUDA only, and nothing answers for it",
    ),
    _Rule(
        "RuntimeError",
        r"Only (contiguous_format|c10::MemoryFormat::Contiguous)|only supported contiguous memory format",
        "this device has no other memory format than the contiguous one. Write memory_format=xamp.accel.channels_last, "
        "which is the one that the device in use takes, or leave the argument out",
    ),
    _Rule(
        "(FileNotFoundError|CalledProcessError)",
        r"(nvidia|npu|rocm)-smi",
        "this program comes with the driver of another device, and nothing answers for it; torch.cuda's own functions "
        "on memory are redirected",
    ),
    _Rule(
        "(RuntimeError|AssertionError)",
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver",
        "this way to CUDA is not redirected. docs/run.md lists what is",
    ),
)


def explain(error: BaseException) -> list[str]:
    """What may be behind ``error``, one line each; empty where nothing is known."""
    text = str(error)
    if isinstance(error, SyntaxError):
        text = f"{text}\n{error.text or ''}"
    found = [f"the script's age: {line}" for line in _removed(error, text)]
    found += [f"the script's age: {rule.text}." for rule in _RULES if rule.text and _fits(rule, error, text)]
    found += [f"not redirected: {rule.text}." for rule in _NOT_REDIRECTED if _fits(rule, error, text)]
    return found


def _fits(rule: _Rule, error: BaseException, text: str) -> bool:
    """Whether ``error`` is of the rule's kind, or of one derived from it: releases raise narrower ones in time."""
    kinds = (kind.__name__ for kind in type(error).__mro__)
    if not any(re.fullmatch(rule.kind, kind) for kind in kinds) or re.search(rule.pattern, text) is None:
        return False
    if not (rule.line or rule.file):
        return True
    frame, number = _of_script(error)
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals) if frame is not None else []
    line = "".join(lines[number - 1 : number])
    if not re.search(rule.line, line) or not re.search(rule.file, "".join(lines)):
        return False
    return not rule.of_bools or (frame is not None and _views_bools(frame, line))


_LIBRARIES = tuple(
    os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))
)


def _of_script(error: BaseException) -> tuple[FrameType | None, int]:
    """The innermost frame of the script, or of a library that it uses, and the line in it that failed."""
    found: tuple[FrameType | None, int] = None, 0
    step = error.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            found = step.tb_frame, step.tb_lineno
        step = step.tb_next
    return found


def _views_bools(frame: FrameType, line: str) -> bool:
    """Whether ``.view`` of a line was called on a comparison: it stands there, or what has the name holds bools."""
    if re.search(r"\.(?:eq|ne|gt|lt|ge|le)\(.*\.view\(", line):
        return True
    called = re.search(r"(\w+)(?:\[[^\]]*\])*\.view\(", line)
    value = frame.f_locals.get(called[1]) if called is not None else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _removed(error: BaseException, text: str) -> list[str]:
    """What took the place of a name that an AttributeError or ImportError misses."""
    if not isinstance(error, (AttributeError, ImportError)):
        return []
    for pattern in (
        r"module '(?P<a>[\w.]+)' has no attribute '(?P<b>\w+)'",
        r"cannot import name '(?P<b>\w+)' from (?:partially initialized module )?'(?P<a>[\w.]+)'",
        r"No module named '(?P<a>[\w.]+)'(?P<b>)",
    ):
        match = re.search(pattern, text)
        if match is not None:
            name = ".".join(filter(None, (match["a"], match["b"])))
            return [
                f"{known} is no more. In its place: {new}." for known, new in REMOVED.items() if _is_part(name, known)
            ]
    return []


def _is_part(name: str, known: str) -> bool:
    return name == known or name.startswith(f"{known}.")
