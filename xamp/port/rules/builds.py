"""Extensions that are compiled for CUDA: their builds, their imports, and the tests that guard them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.scopes import dotted
from xamp.port.source import Node, kind, text_of
from xamp.port.vendor_names import library_of
from xamp.port.vendor_only import CALLS
from xamp.port.work import Work

__all__ = ["KEPT", "RULES", "guards_build", "is_caught"]

_EXTENSION = re.compile(r"_C\d*$|(?:^|_)ext$|_cuda(?:_ext|_kernels?|_ops?|_v\d+)?$|^cuda_ext$|_cuda_\w*kernel$")
_ON_EACH = ("torch", "torch_npu", "torchvision", "torchaudio", "xamp")  # not for CUDA only
_MAKES = re.compile(r"(?i)cuda\w*ext|ext\w*cuda|nvcc")
_SOURCE = re.compile(r"\.cu$|nvcc$|^WITH_CUDA$|cuda\w*\.(?:so|dll|pyd)$")
_BUILDS = ("torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline")
_PARTS = (*_BUILDS, "torch.utils.cpp_extension.CUDAExtension", "torch.utils.cpp_extension.CUDA_HOME")
_JOINS = ("BooleanOperation", "UnaryOperation", "Comparison", "ComparisonTarget")
_ASKS = {f"{home}.{name}" for home in ("torch.cuda", "torch.npu") for name in ("is_available", "device_count")}
KEPT = "asks for CUDA itself, for it guards what is built for CUDA only; so it stays"
_MIXED = (
    "guards what is built for CUDA only, and other things; where it guards the build, ask torch.cuda.is_available()"
)
_COMPILED = "this may be an extension that is compiled for CUDA; another device needs its own, or torch's own operators"
_CATCHES = re.compile(r"ImportError|ModuleNotFoundError|Exception|RuntimeError|OSError")


def is_caught(work: Work, node: Node) -> bool:
    """Whether the failure of an import is caught, or the import is for type checkers, or asks for CUDA first."""
    below = node
    for each in work.source.above(node):
        what = kind(each)
        if what in ("Try", "TryStar") and each.body is below:
            if any(handler.type is None or _CATCHES.search(work.code(handler.type)) for handler in each.handlers):
                return True
        elif what == "If" and below is each.body and re.search(r"TYPE_CHECKING|is_available\(\)", work.code(each.test)):
            return True
        below = each
    return False


def is_extension(module: str) -> bool:
    """Whether a module's name is one that compiled extensions have; of torch, that part is there on every device."""
    return (
        module.partition(".")[0] not in _ON_EACH
        and _EXTENSION.search(module) is not None
        and library_of(module) is None
    )


def _subtree(work: Work, *tops: Node) -> Iterator[Node]:
    waiting = [top for top in tops if top is not None]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += work.source.children(node)


def _is_built(work: Work, node: Any) -> bool:
    """Whether a node builds or imports what is for CUDA only."""
    what = kind(node)
    if what in ("Name", "Attribute"):
        path = work.path(node)
        return bool(path) and (path in _PARTS or (not path.startswith(".") and library_of(path) is not None))
    if what == "Call":
        return _MAKES.search(work.code(node.func).rpartition(".")[2]) is not None
    if what == "ImportFrom":
        module = dotted(node.module) if node.module is not None else ""
        names = [] if kind(node.names) == "ImportStar" else [alias.name.value for alias in node.names]
        paths = [f"{module}.{name}" for name in names] or [module]
        if module.partition(".")[0] in _ON_EACH and not node.relative:
            return False
        return any(is_extension(path.rpartition(".")[2]) or is_extension(module) for path in paths) or (
            not node.relative and any(library_of(path) is not None for path in paths)
        )
    if what == "Import":
        paths = [dotted(alias.name) for alias in node.names]
        return any(is_extension(path) or library_of(path) is not None for path in paths)
    return _SOURCE.search(text_of(node) or "") is not None


class Guards(Rule):
    """`torch.cuda.is_available()` that guards the build or the import of a CUDA extension stays CUDA's, with a note.

    A test that guards other things too becomes `xamp.is_available()`, with a note. A call of `cpp_extension.load` with
    sources for CUDA is unsupported.
    """

    name = "cuda-builds"
    grade = Grade.NOTED
    met = 4
    kinds = ("Call", "Import", "ImportFrom")
    examples = (
        Example(
            "import torch\nif torch.cuda.is_available() or force:\n    sources += ['nms.cu']\n",
            f"import torch\n# TODO(xamp): {KEPT}\nif torch.cuda.is_available() or force:\n    sources += ['nms.cu']\n",
        ),
        Example(
            "import torch\nif torch.cuda.is_available():\n    from . import roi_cuda\n",
            f"import torch\n# TODO(xamp): {KEPT}\nif torch.cuda.is_available():\n"
            f"    # TODO(xamp): {_COMPILED}\n    from . import roi_cuda\n",
        ),
    )
    unchanged = (
        "from . import cuda_utils\nload('a.cu')\n",
        "import torch._C\nfrom torch import _C\nfrom torch._C import _disabled_torch_function_impl\n",
        "import torchvision._C\nfrom torchaudio import _ext\n",
    )

    def begin(self, work: Work) -> None:
        """See :meth:`Rule.begin`."""
        for node in work.source.nodes:
            if kind(node) == "Call" and work.path(node.func) in _ASKS and guards_build(work, node):
                ref = work.resolve(node.func)
                for binding in ref.bindings if ref is not None else ():
                    if binding.path != "torch" and binding not in work.kept:
                        work.kept.add(binding)
                        work.say(self, binding.node, Grade.NEUTRAL, KEPT, inline=False)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if kind(node) != "Call":
            self._import(node, work)
        elif (path := work.path(node.func)) in _ASKS:
            self._ask(node, work)
        elif path in _BUILDS:
            code = work.code(node)
            never = ".cu'" in code or '.cu"' in code or "cuda_sources" in code
            text = CALLS["torch.utils.cpp_extension.CUDAExtension"].text
            work.say(self, node, Grade.UNSUPPORTED if never else Grade.NOTED, text)

    def _import(self, node: Any, work: Work) -> None:
        module = dotted(node.module) if kind(node) == "ImportFrom" and node.module is not None else ""
        if kind(node) == "ImportFrom" and kind(node.names) == "ImportStar":
            names = []
        else:
            names = [dotted(alias.name) for alias in node.names]
        if any(work.target(each) is not None for each in (module, *names) if each):
            return
        if (module or names[0]).partition(".")[0] in _ON_EACH and not getattr(node, "relative", ()):
            return
        if names == ["_C"] and re.search(r"config|default", module):
            return  # yacs calls a configuration so
        if is_extension(module) or any(is_extension(name) for name in names):
            work.say(self, node, Grade.NOTED, _COMPILED)

    def _ask(self, node: Any, work: Work) -> None:
        found = list(_guarded(work, node, 0))
        if not any(found):
            return
        if all(found):
            work.claim(node.func)
            work.say(self, node, Grade.NOTED, KEPT)
        else:
            work.say(self, node, Grade.NOTED, _MIXED)


def guards_build(work: Work, test: Any) -> bool:
    """Whether all that a test decides is built for CUDA only."""
    found = list(_guarded(work, test, 0))
    return bool(found) and all(found)


def _guarded(work: Work, node: Any, depth: int) -> Iterator[bool]:
    """For each thing that an answer decides, whether it is a build for CUDA."""
    below, above = node, work.parent(node)
    while kind(above) in _JOINS or (kind(above) in ("Arg", "Call") and _is_cast(work, above)):
        below, above = above, work.parent(above)
    what = kind(above)
    if what == "NamedExpr":
        yield from _guarded(work, above, depth)
        if depth < 3:
            yield from _of_name(work, above, depth)
    elif what == "Arg":
        call = work.parent(above)
        yield any(_is_built(work, each) for each in (call, getattr(call, "func", None)) if each is not None)
    elif what in ("If", "IfExp") and above.test is below:
        yield any(_is_built(work, each) for each in _subtree(work, above)) or _leaves_before(work, above)
    elif what == "Assert":
        yield _leaves_before(work, above)
    elif what in ("Assign", "AnnAssign", "Return") and depth < 3:
        yield from _of_name(work, above, depth)
    else:
        yield False


def _is_cast(work: Work, node: Any) -> bool:
    """Whether a node is, or is an argument of, ``bool(...)`` or ``int(...)``."""
    call = node if kind(node) == "Call" else work.parent(node)
    return kind(call) == "Call" and work.code(call.func) in ("bool", "int")


def _leaves_before(work: Work, test: Any) -> bool:
    """Whether a build stands below a test that leaves its block: ``if not is_available(): return``."""
    line = test if kind(test) == "If" else work.parent(test)
    if kind(test) == "If" and not re.search(r"\b(?:return|raise|exit|continue)\b", work.code(test.body)):
        return False
    block = work.parent(line)
    if kind(block) not in ("IndentedBlock", "Module"):
        return False
    rest = [each for each in block.body if work.source.span(each)[0] > work.source.span(line)[0]]
    return any(_is_built(work, each) for each in _subtree(work, *rest))


def _of_name(work: Work, statement: Any, depth: int) -> Iterator[bool]:
    """What the name decides that an answer is assigned to, or the function that returns it."""
    uses = list(_uses(work, statement))
    if not uses and kind(statement) != "NamedExpr":
        yield False
    for use in uses:
        yield from _guarded(work, use, depth + 1)


def _uses(work: Work, statement: Any) -> Iterator[Node]:
    """Where the answer is used that a statement assigns, or returns: ``ok``, ``self.ok``, ``has()``, ``self.has()``."""
    if kind(statement) == "Return":
        target: Any = next((each for each in work.source.above(statement) if kind(each) == "FunctionDef"), None)
        name = target.name.value if target is not None else ""
    else:
        target = statement.targets[0].target if kind(statement) == "Assign" else statement.target
        name = target.attr.value if kind(target) == "Attribute" else ""
    found = [use for each, uses in work.scopes.uses.items() if each.node is target for use in uses]
    found += [each for each in work.source.nodes if name and kind(each) == "Attribute" and each.attr.value == name]
    for use in found:
        parent = work.parent(use)
        if use is not target and kind(parent) not in ("AssignTarget", "AnnAssign"):
            yield parent if kind(parent) == "Call" and parent.func is use else use


RULES = (Guards(),)
