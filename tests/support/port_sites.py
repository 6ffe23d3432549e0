"""What a script says of CUDA, Apex and Ascend, found by Python's own parser; shares no code with ``xamp.port``.

It resolves names by the imports of the whole file, as a reader would who counts by hand, and not by scope. It says
which places a port must rewrite for certain, what a port has left, and what a port must not have touched.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Place", "certain", "leftovers", "spoken"]

_SAME_IN_XAMP = {
    *("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "float_function", "half_function"),
    *("promote_function", "register_half_function", "register_float_function", "register_promote_function"),
    "disable_casts",
}
_ACCEL = {
    *("set_device", "is_available", "device_count", "synchronize", "empty_cache", "manual_seed_all", "manual_seed"),
    *(
        "max_memory_allocated",
        "current_device",
        "Stream",
        "stream",
        "memory_reserved",
        "current_stream",
        "get_rng_state",
    ),
    *("set_rng_state", "is_bf16_supported", "memory_cached", "Event", "memory_allocated", "get_device_name"),
    *("get_device_properties", "get_device_capability", "reset_peak_memory_stats", "reset_max_memory_allocated"),
    *("get_rng_state_all", "set_rng_state_all", "max_memory_reserved", "max_memory_cached", "mem_get_info", "seed_all"),
}
_AMP = {"autocast", "GradScaler", "custom_fwd", "custom_bwd"}
_APEX_PARTS = {
    "parallel": {"DistributedDataParallel", "convert_syncbn_model", "SyncBatchNorm"},
    "optimizers": {"FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad"},
    "normalization": {"FusedLayerNorm"},
}


class Place(NamedTuple):
    """One place: what it is, and the line."""

    what: str
    line: int


class _File:
    """A parsed file with its imports and the node around each node."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.lines = text.splitlines()
        self.around: dict[ast.AST, ast.AST] = {}
        self.names: dict[str, set[str]] = {}
        self.bound: set[str] = set()
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.around[child] = node
            if isinstance(node, ast.Import):
                for alias in node.names:
                    local, path = (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
                    self.names.setdefault(local, set()).add(path)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self.names.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.arg):
                self.bound.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.bound.add(node.id)

    def path(self, node: ast.AST) -> str:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        found = self.names.get(node.id, set())
        return ".".join([next(iter(found)), *parts]) if len(found) == 1 else ""

    def is_sure(self, node: ast.AST) -> bool:
        """Whether nothing but an import gives the first name of a chain its value."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.bound


def certain(text: str) -> list[Place]:
    """The places that a port rewrites without a word."""
    file = _File(text)
    return sorted({*_names(file), *_imports(file), *_calls(file), *_texts(file)}, key=lambda place: place.line)


def _names(file: _File) -> Iterator[Place]:
    for node in ast.walk(file.tree):
        if not isinstance(node, (ast.Attribute, ast.Name)) or isinstance(file.around.get(node), ast.Attribute):
            continue
        path = file.path(node)
        head, _, last = path.rpartition(".")
        if not file.is_sure(node) or (isinstance(node, ast.Name) and path):
            continue
        if head in ("torch.cuda", "torch.npu") and last in _ACCEL:
            yield Place("torch.cuda function", node.lineno)
        elif head in ("torch.cuda.amp", "torch.npu.amp") and last in _AMP:
            yield Place("torch.cuda.amp name", node.lineno)
        elif head == "apex.amp" and last in _SAME_IN_XAMP and "apex" in ast.unparse(node):
            yield Place("apex.amp name", node.lineno)
        elif last in _APEX_PARTS.get(head.removeprefix("apex."), ()) and ast.unparse(node).startswith("apex."):
            yield Place("apex class", node.lineno)


def _imports(file: _File) -> Iterator[Place]:
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            part = node.module.removeprefix("apex.")
            native = node.module == "torch.cuda.amp" and alias.name in _AMP
            if path in ("apex.amp", "torch.cuda.amp") or native or alias.name in _APEX_PARTS.get(part, ()):
                yield Place("import", node.lineno)


def _calls(file: _File) -> Iterator[Place]:
    own = any(isinstance(node, ast.FunctionDef) and node.name in ("cuda", "npu") for node in ast.walk(file.tree))
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("cuda", "npu") and not own and not file.path(node.func):
            arguments = [*node.args, *(word.value for word in node.keywords if word.arg == "device")]
            plain = not arguments or isinstance(arguments[0], ast.Constant) or _is_index(arguments[0])
            if plain and not any(isinstance(each, ast.Starred) for each in node.args):
                yield Place(".cuda()", node.func.end_lineno or node.lineno)
        if file.path(node.func) == "torch.device" and node.args and _is_device(node.args[0]):
            yield Place("torch.device", node.lineno)


def _is_index(node: ast.AST) -> bool:
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return bool(re.search(r"gpu|rank|^i$|_id$", last))


def _is_device(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and re.fullmatch(r"(cuda|npu)(:\d+)?", value) is not None


def _texts(file: _File) -> Iterator[Place]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if node.arg == "backend" and node.value.value in ("nccl", "hccl"):
                yield Place("backend", node.value.lineno)
            elif node.arg in ("device", "map_location") and _is_device(node.value):
                yield Place("device=", node.value.lineno)
        elif isinstance(node, ast.Call):
            yield from _text_arguments(file, node)
        elif isinstance(node, ast.IfExp) and isinstance(node.orelse, ast.Constant) and node.orelse.value == "cpu":
            if _is_device(node.body):
                yield Place("choice", node.body.lineno)
        elif isinstance(node, ast.JoinedStr) and len(node.values) == 2 and isinstance(node.values[0], ast.Constant):
            speaks = isinstance(file.around.get(node), ast.Call) and "device" not in ast.unparse(file.around[node])
            if node.values[0].value in ("cuda:", "npu:") and not speaks:
                yield Place("f-string", node.lineno)


def _text_arguments(file: _File, node: ast.Call) -> Iterator[Place]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name == "init_process_group" and node.args and isinstance(node.args[0], ast.Constant):
        if node.args[0].value in ("nccl", "hccl"):
            yield Place("backend", node.lineno)
    elif name == "to" and node.args and _is_device(node.args[0]):
        yield Place(".to()", node.args[0].lineno)
    elif name == "add_argument" and node.args and isinstance(node.args[0], ast.Constant):
        for word in node.keywords:
            flag = str(node.args[0].value)
            if word.arg != "default" or not isinstance(word.value, ast.Constant):
                continue
            if (flag == "--device" and _is_device(word.value)) or ("backend" in flag and word.value.value == "nccl"):
                yield Place("option", word.value.lineno)


def leftovers(text: str) -> list[Place]:
    """References to Apex, torch.cuda and ``"nccl"`` above which no note stands."""
    file = _File(text)
    found = []
    for node in ast.walk(file.tree):
        what = _left(file, node)
        if what and not _is_noted(file, node):
            found.append(Place(what, getattr(node, "lineno", 0)))
    return found


def _left(file: _File, node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return next((f"import {name}" for name in names if re.match(r"(apex|torch\.cuda\.amp)(\.|$)", name)), "")
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        return next((f"from {name}" for name in names if re.match(r"(apex|torch\.cuda)(\.|$)", name)), "")
    if isinstance(node, ast.Attribute) and not isinstance(file.around.get(node), ast.Attribute):
        path = file.path(node) if file.is_sure(node) else ""
        return path if re.match(r"(torch\.cuda|torch\.npu)\.|apex\.", path) and "amp.amp" not in path else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
        own = any(isinstance(each, ast.FunctionDef) and each.name == "cuda" for each in ast.walk(file.tree))
        return "" if own or file.path(node.func) else ".cuda()"
    if isinstance(node, ast.Constant) and node.value == "nccl":
        around = file.around.get(node)
        is_key = isinstance(around, (ast.Expr, ast.Subscript)) or (isinstance(around, ast.Dict) and node in around.keys)
        return "" if is_key or (isinstance(around, ast.keyword) and around.arg == "help") else "nccl"
    return ""


def _is_noted(file: _File, node: ast.AST) -> bool:
    """Whether a note stands above the statement, or above one on the same line around it."""
    found: ast.AST | None = node
    while found is not None:
        if isinstance(found, (ast.stmt, ast.ExceptHandler)):
            number = found.lineno - 1
            while number > 0 and file.lines[number - 1].lstrip().startswith(("#", "@")):
                if "TODO(xamp)" in file.lines[number - 1]:
                    return True
                number -= 1
            if not isinstance(found, (ast.FunctionDef, ast.ClassDef)) and found.lineno != getattr(node, "lineno", 0):
                return False
        found = file.around.get(found)
    return False


def spoken(text: str) -> list[str]:
    """What people read, or what names data: comments, docstrings, help texts, messages, keys; a port leaves it all."""
    found = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# TODO(xamp)")
    ]
    file = _File(text)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(repr(node.value.value))
        elif isinstance(node, ast.Dict):
            found += [repr(key.value) for key in node.keys if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            found.append(repr(node.value.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.append(repr(node.slice.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found += [repr(each.value) for each in node.args if isinstance(each, ast.Constant)]
    return sorted(found)
