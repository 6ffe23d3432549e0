"""Looks names and texts up in the table of what runs on one vendor's devices only, :mod:`xamp.port.vendor_only`."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable

from xamp.port.vendor_only import CALLS, LIBRARIES, PREFIXES, VARIABLES, Library, Name, Variable

__all__ = ["MENTIONS", "NAMES", "call_of", "library_of", "package_of", "variables_in"]

_WORDS = (
    r"cuda|nccl|nvidia|cudnn|cublas|nvcc|nvtx|nvml|nvrtc|tensorrt|\bapex\b|\bnsys\b|\bncu\b|\bnvprof\b|\bcu1\d\d\b|"
    # Those that no other word has in it, so that spconv_backbone is found too.
    r"spconv|triton|flash_?attn|xformers|bitsandbytes|minkowski|pynvml|pycuda|"
    # "input", "unpublished" and "nonpublic" hold "npu", and "ascending" is no card.
    r"(?<!i)(?<!\bu)(?<!\bno)npu|hccl|ascend(?!ing|ed|s\b|an|en|er)|\bcann(?:\b|Exec)|/dev/(?:davinci|devmm_svm|hisi_hdc)"
)
# Names of libraries that are plain words too, or of which only a part is CUDA's.
_PLAIN = {
    *("warp", "cute", "dcn", "awq", "rmm", "nixl", "vpf", "megatron", "rapids", "omni", "reikna"),
    *("acl", "te", "tbe"),
    *("numba", "faiss", "cv2", "pytorch3d", "mmcv", "mmdet", "mmdet3d", "detectron2", "maskrcnn_benchmark"),
}


def _pattern(words: Iterable[str]) -> str:
    return rf"(?i){_WORDS}|\b(?:{'|'.join(map(re.escape, sorted(words)))})\b"


def _roots() -> set[str]:
    """Words by which a text that names a library is found."""
    modules = {module.partition(".")[0] for library in LIBRARIES for module in library.modules.split()}
    return modules | {name.strip("*").rstrip("-") for library in LIBRARIES for name in library.packages.split()}


NAMES = re.compile(rf"{_pattern(_roots())}|--gpus\b".encode())
"""Finds a text that this table says anything of."""
MENTIONS = re.compile(_pattern(_roots() - _PLAIN).encode())
"""Finds a line that names a vendor's devices or a library for them."""


@functools.cache
def _modules() -> dict[str, Library]:
    return {module: library for library in LIBRARIES for module in library.modules.split()}


def library_of(path: str) -> tuple[str, Library] | None:
    """The module of a library that a dotted path belongs to, and the library."""
    while path:
        if path in _modules():
            return path, _modules()[path]
        path = path.rpartition(".")[0]
    return None


def call_of(path: str) -> Name | None:
    """The entry of :data:`CALLS` that a dotted path belongs to."""
    while path:
        if path in CALLS:
            return CALLS[path]
        path = path.rpartition(".")[0]
    return None


@functools.cache
def package_of(name: str) -> Library | None:
    """The library of a package, however it is spelled: ``flash_attn``, ``Flash-Attn``."""
    spelled = re.sub(r"[-_.]+", "-", name).lower()
    for library in LIBRARIES:
        if any(fnmatch.fnmatchcase(spelled, package) for package in library.packages.split()):
            return library
    return None


_VARIABLE = re.compile(r"(?<![A-Za-z0-9_])[A-Z]+_?[A-Z0-9_]*(?![A-Za-z0-9_])")


def variables_in(text: str) -> list[tuple[int, str, Variable]]:
    """The variables of :data:`VARIABLES` in a text: where each stands, its name, and what is known of it."""
    found = []
    for each in _VARIABLE.finditer(text):
        known = VARIABLES.get(each[0])
        if known is None and each[0].startswith(PREFIXES):
            known = Variable()
        if known is not None:
            found.append((each.start(), each[0], known))
    return found
