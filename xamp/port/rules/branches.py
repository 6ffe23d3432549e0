"""Branches for CUDA and for Ascend: rewritten both, their conditions would be the same, and one branch dead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from xamp.port import npu_import
from xamp.port.flags import is_negative, operands, values_of
from xamp.port.places import is_device_place, place_of
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_method import index_of
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_BOTH = "CUDA and Ascend have a branch each, so both tests stay; say which branch other devices take"
_ASKED = f"{_BOTH}. Where torch_npu is not installed torch has no npu: xamp.device_type() == 'npu' asks for it anywhere"
_SAME = "CUDA and Ascend had a branch each, and they do the same now: take one out"
_KEYS = (
    "CUDA and Ascend have a key each, which would become one key, so both stay; xamp.device_type() says which to take"
)
_MEMBERS = (
    "CUDA and Ascend have a member each, which would become equal, so both stay; "
    "xamp.accel is the one of the device in use"
)
_CASE = "a case calls nothing, so its text stays; write case _ if ... == xamp.device_type(): for the device in use"
_TEXT = re.compile(r"(cuda|npu|nccl|hccl)(?::(?:\d*|%[dsi]|\{.*\}))?")
_WORD = re.compile(r"torch_npu\.npu\b|torch_npu\b|cuda|npu|nccl|hccl")
_HOMES = {"torch.cuda": "cuda", "torch.npu": "npu", "torch_npu": "npu"}
_MODULES = ("torch.cuda", "torch.npu", "torch_npu.npu")
_SAME_TWICE = ("any", "all", "max", "min", "set")  # of two answers that are the same they give that answer
_FAMILY = {"cuda": "cuda", "nccl": "cuda", "npu": "npu", "hccl": "npu", "is_cuda": "cuda", "is_npu": "npu"}
_DEEPEST = 3


class Apart(Rule):
    """Conditions that ask for CUDA in one branch and for Ascend in another stay as they are, with a note.

    Both would ask for the device in use, so that the second branch is dead, or both run. The same for conditional
    expressions, flags that are set before, sums, keys of a dict that are devices, `torch.cuda` beside `torch.npu` in a
    dict, a list or a call, and the cases of a `match`. Branches that do the same are rewritten, with a note.
    """

    name = "branches-apart"
    grade = Grade.NOTED
    kinds = ("MatchValue",)
    examples = (
        Example(
            "if d.startswith('cuda'):\n    a()\nelif d.startswith('npu'):\n    b()\n",
            f"# TODO(xamp): {_BOTH}\nif d.startswith('cuda'):\n    a()\n"
            f"# TODO(xamp): {_BOTH}\nelif d.startswith('npu'):\n    b()\n",
        ),
        Example(
            "import torch\nif torch.npu.is_available():\n    a()\nif torch.cuda.is_available():\n    b()\n",
            f"import torch\n# TODO(xamp): {_ASKED}\nif torch.npu.is_available():\n    a()\n"
            f"# TODO(xamp): {_ASKED}\nif torch.cuda.is_available():\n    b()\n",
        ),
        Example(
            "on_npu = device == 'npu'\non_cuda = device == 'cuda'\nsize = 16 if on_npu else 32 if on_cuda else 8\n",
            f"# TODO(xamp): {_BOTH}\non_npu = device == 'npu'\n# TODO(xamp): {_BOTH}\non_cuda = device == 'cuda'\n"
            "size = 16 if on_npu else 32 if on_cuda else 8\n",
        ),
        Example(
            "import torch\nsizes = {torch.device('cuda'): 32, torch.device('npu'): 16}\n",
            f"import torch\n# TODO(xamp): {_KEYS}\nsizes = {{torch.device('cuda'): 32, torch.device('npu'): 16}}\n",
        ),
        Example(
            "import torch\nhomes = {'cuda': torch.cuda, 'npu': torch.npu}\n",
            f"import torch\n# TODO(xamp): {_MEMBERS}\nhomes = {{'cuda': torch.cuda, 'npu': torch.npu}}\n",
        ),
        Example(
            "import torch\nused = {'cuda': torch.cuda.memory_allocated(), 'npu': torch.npu.memory_allocated()}\n",
            f"import torch\n# TODO(xamp): {_ASKED}\n"
            "used = {'cuda': torch.cuda.memory_allocated(), 'npu': torch.npu.memory_allocated()}\n",
        ),
        Example(
            "match device:\n    case 'cuda':\n        a()\n    case 'npu':\n        b()\n",
            f"match device:\n    # TODO(xamp): {_CASE}\n    case 'cuda':\n        a()\n"
            f"    # TODO(xamp): {_CASE}\n    case 'npu':\n        b()\n",
        ),
        Example(
            "import torch\nif torch.cuda.is_available():\n    x = x.cuda()\nelif torch.npu.is_available():\n"
            "    x = x.npu()\n",
            f"import torch\nimport xamp\nif xamp.is_available():\n    x = x.to(xamp.device())\n# TODO(xamp): {_SAME}\n"
            "elif xamp.is_available():\n    x = x.to(xamp.device())\n",
        ),
    )
    unchanged = (
        "sizes = {'cuda': 32, 'npu': 16}\nsize = sizes[device]\n",
        "if mode == 'fast':\n    a()\nelif 'npu_ids' in args:\n    b()\n",
        "if args.cuda:\n    a()\nif args.npu:\n    b()\n",
        "match mode:\n    case 'fast':\n        a()\n    case Point(x=0):\n        b()\n",
        "homes = {'cuda': mine.of_cuda, 'npu': mine.of_npu}\n",
        "homes = {'cuda': 'torch.cuda', 'npu': 'torch.npu'}\n",
        "from mine import cuda, npu\nhomes = [cuda, npu]\nhomes['cuda'] = cuda\nhomes['npu'] = npu\n",
    )

    def begin(self, work: Work) -> None:
        """See :meth:`Rule.begin`."""
        if not (b"cuda" in work.source.data or b"nccl" in work.source.data):
            return
        for node in work.source.nodes:
            what = kind(node)
            if what in ("If", "IfExp") and not _goes_on(work, node):
                members = _members(node)
                self._chain(members, work)
                if kind(members[-1].orelse) == "Else":
                    for each in _tests(work, members[-1].orelse.body):
                        self._chain([*members, *_members(each)], work)
            if what == "BooleanOperation" and _is_whole(work, node):
                self._joined(node, work)
            if what in _TOLD:
                self._answers(_told(work, node), work)
            if what in ("Module", "IndentedBlock"):
                self._sequence(_tests(work, node), work)
                for labels, values in _put(work, node):
                    if self._answers(values, work):
                        work.claim(*labels)
            elif what == "Dict":
                self._keys(node, work)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        found = _TEXT.fullmatch(text_of(node.value) or "")
        if found is not None and not work.is_kept(self, node):
            work.claim(node.value)
            work.say(self, node, Grade.NOTED, _CASE)

    def _chain(self, members: list[Any], work: Work) -> None:
        leaves = [list(_asked(work, each.test, 0)) for each in members]
        families = [{family for _, family in each} for each in leaves]
        if {"cuda"} not in families or {"npu"} not in families:
            return
        first, second = members[families.index({"cuda"})], members[families.index({"npu"})]
        if _alike(work, first.test) == _alike(work, second.test) and _ported(work, first) == _ported(work, second):
            late = max((first, second), key=lambda each: work.source.span(each)[0])
            if not work.is_kept(self, late):
                work.say(self, late.test, Grade.NOTED, _SAME)
            return
        self._keep([leaf for each in leaves for leaf, _ in each], work)

    def _sequence(self, tests: list[Any], work: Work) -> None:
        """``if d == "cuda": ...`` and below it ``if d == "npu": ...``: both would run."""
        seen: dict[str, list[Any]] = {}
        for each in tests:
            seen.setdefault(_alike(work, _truth(work, each.test)), []).append(each)
        for alike in seen.values():
            leaves = [list(_asked(work, each.test, 0)) for each in alike]
            families = [{family for _, family in each} for each in leaves]
            same = all(_only_asks(work, each) for each in alike) and len({_ported(work, each) for each in alike}) == 1
            if {"cuda"} in families and {"npu"} in families and not same:
                self._keep([leaf for each in leaves for leaf, _ in each], work)

    def _joined(self, node: Any, work: Work) -> None:
        """``torch.cuda.is_available() and not torch.npu.is_available()``: never true, if both asked the same."""
        sign = kind(node.operator)
        seen: dict[str, list[tuple[Any, bool]]] = {}
        for each in operands(node, sign):
            leaves = list(_asked(work, each, 0))
            if len({family for _, family in leaves}) == 1:
                seen.setdefault(leaves[0][1], []).extend((leaf, is_negative(work, each)) for leaf, _ in leaves)
        ways = {negative for each in seen.values() for _, negative in each}
        if len(seen) == 2 and ways != {sign == "And"}:  # neither of both, or one of them, may be asked twice
            self._keep([leaf for each in seen.values() for leaf, _ in each], work)

    def _answers(self, values: list[Any], work: Work) -> bool:
        """``{"cuda": torch.cuda.is_available(), "npu": torch.npu.is_available()}``: would be the same, so both stay.

        Returns:
            Whether they do.
        """
        questions = [each for each in values if _is_question(work, each)]
        leaves = [list(_asked(work, each, 0)) for each in questions]
        families = [{family for _, family in each} for each in leaves]
        if {"cuda"} not in families or {"npu"} not in families:
            return False
        text = _MEMBERS if any(work.path(each) in _MODULES for each in questions) else ""
        self._keep([leaf for each in leaves for leaf, _ in each], work, text)
        return True

    def _keys(self, node: Any, work: Work) -> None:
        keys = [each.key for each in node.elements if kind(each) == "DictElement"]
        leaves = [(key, leaf, family) for key in keys for leaf, family in _leaves(work, key) if text_of(key) is None]
        alike = [_alike(work, key) for key in keys]
        if work.is_kept(self, node) or len(set(alike)) == len(alike):
            return
        if len({family for _, _, family in leaves}) == 2:
            work.claim(*(leaf for _, leaf, _ in leaves), *(key for key, _, _ in leaves))
            for _, leaf, _ in leaves:
                _keep_import(work, leaf)
            work.say(self, node, Grade.NOTED, _KEYS)

    def _keep(self, leaves: list[Any], work: Work, text: str = "") -> None:
        asks = any(work.path(leaf) for leaf in leaves)
        for leaf in leaves:
            if not work.is_claimed(leaf) and not work.is_kept(self, leaf):
                work.claim(leaf)
                _keep_import(work, leaf)
                work.say(self, leaf, Grade.NOTED, text or (_ASKED if asks else _BOTH))


_TOLD = ("Match", "Dict", "List", "Tuple", "Set", "Call", "BinaryOperation", "Comparison")


def _tests(work: Work, block: Any) -> list[Any]:
    """The ``if`` of a block, and each ``a if ... else b`` that its lines hold, but for those that choose a device."""
    found: list[Any] = []
    for line in block.body:
        waiting = [line] if kind(line) == "SimpleStatementLine" else []
        while waiting:
            each = waiting.pop()
            if kind(each) == "IfExp":
                found += [] if _ported(work, each) in ("@", "torch.device(@)") else [each]
            else:
                waiting += work.source.children(each)
        if kind(line) == "If":
            found.append(line)
    return found


def _told(work: Work, node: Any) -> list[Any]:
    """What a ``match`` asks for at once, what a dict, a list or a call has under names, what is added or compared."""
    what = kind(node)
    if what in ("BinaryOperation", "Comparison"):
        right = [node.right] if what == "BinaryOperation" else [each.comparator for each in node.comparisons]
        return [each for each in (node.left, *right) if any(work.path(leaf) for leaf, _ in _leaves(work, each))]
    if what == "Match":
        return [each.value for each in node.subject.elements] if kind(node.subject) == "Tuple" else []
    if what == "Call":
        return [each.value for each in node.args if each.keyword is not None]
    return [] if _may_be_equal(work, node) else list(_held(node))


def _held(node: Any) -> Iterator[Any]:
    """What a dict or a list holds, and what those in it do: ``[("cuda", torch.cuda), ("npu", torch.npu)]``."""
    for each in node.elements:
        if kind(each.value) in ("Dict", "List", "Tuple", "Set"):
            yield from _held(each.value)
        else:
            yield each.value


def _may_be_equal(work: Work, members: Any) -> bool:
    """Whether two members may be the same: in ``any([...])``, in ``x in (...)``, and in ``a, b = ...``."""
    around = work.parent(members)
    if getattr(around, "target", None) is members:  # the a, b of a, b = ...
        return True
    if kind(around) == "Arg":
        return work.code(work.parent(around).func) in _SAME_TWICE
    if kind(around) == "Assign" and around.value is members:
        return all(kind(each.target) in ("Tuple", "List") for each in around.targets)
    return kind(around) == "ComparisonTarget"


def _put(work: Work, block: Any) -> list[tuple[list[Any], list[Any]]]:
    """What the lines of a block put into the same dict: ``on["cuda"] = ...``, ``register("cuda", ...)``.

    Returns:
        For each dict or function the names of devices that a call of it has, and what it is given under them.
    """
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for line in block.body:
        for each in line.body if kind(line) == "SimpleStatementLine" else ():
            if kind(each) == "Assign" and kind(target := each.targets[0].target) == "Subscript":
                found.setdefault(work.code(target.value), ([], []))[1].append(each.value)
            elif kind(each) == "Expr" and kind(call := each.value) == "Call" and _is_under_name(call):
                labels, values = found.setdefault(work.code(call.func), ([], []))
                labels.append(call.args[0].value)
                values += [arg.value for arg in call.args[1:]]
    return list(found.values())


def _is_under_name(call: Any) -> bool:
    """Whether a call's first argument is a text for CUDA or Ascend."""
    return bool(call.args) and _TEXT.fullmatch(text_of(call.args[0].value) or "") is not None


def _is_question(work: Work, node: Any, depth: int = 0) -> bool:
    """Whether a value is an answer, what gives one, or the module itself; a name is what it is set to."""
    what = kind(node)
    if what == "Lambda":
        return _is_question(work, node.body, depth)
    if what in ("Name", "Attribute", "Call"):
        path = work.path(node.func if what == "Call" else node)
        if path:
            return path.startswith(tuple(f"{home}." for home in _HOMES)) or (what != "Call" and path in _MODULES)
        if what == "Attribute" and node.attr.value in ("is_cuda", "is_npu"):
            return True
        return depth < _DEEPEST and any(_is_question(work, each, depth + 1) for each in values_of(work, node))
    return what in ("Comparison", "BooleanOperation", "UnaryOperation", "BinaryOperation")


def _keep_import(work: Work, leaf: Any) -> None:
    """``from torch import npu``, where ``npu.is_available()`` stays: the import gives what it gave."""
    if work.path(leaf).startswith("torch.npu"):
        work.found.setdefault(npu_import.NAMED, []).append(leaf)
    ref = work.resolve(leaf)
    for binding in ref.bindings if ref is not None else ():
        if binding.path not in (None, "torch", "torch_npu") and binding not in work.kept:
            work.kept.add(binding)


def _is_whole(work: Work, node: Any) -> bool:
    """Whether an ``and``, or an ``or``, is no part of a longer one."""
    parent = work.parent(node)
    return kind(parent) != "BooleanOperation" or kind(parent.operator) != kind(node.operator)


def _goes_on(work: Work, node: Any) -> bool:
    """Whether a condition is the ``elif`` of another, or its ``else a if b else c``."""
    parent = work.parent(node)
    return kind(parent) == kind(node) and parent.orelse is node


def _members(node: Any) -> list[Any]:
    found = []
    what = kind(node)
    while kind(node) == what:
        found.append(node)
        node = node.orelse
    return found


def _alike(work: Work, node: Node) -> str:
    """The text of a node, with one word for CUDA and Ascend."""
    return _WORD.sub("@", " ".join(work.code(node).split())).replace("torch.@", "@")


def _ported(work: Work, branch: Any) -> str:
    """The text of what a branch does, with one word for what is rewritten for certain, in CUDA's form and Ascend's."""
    start, end = work.source.span(branch.body)
    parts, done = [], start
    for leaf in _certain(work, branch.body):
        low, high = work.source.span(leaf)
        parts += [work.source.data[done:low], b"@"]
        done = high
    parts.append(work.source.data[done:end])
    return b" ".join(b"".join(parts).split()).decode()


def _certain(work: Work, node: Any) -> Iterator[Node]:
    """The names below a node that become xamp's wherever they stand, and the texts where a device or backend stands."""
    what = kind(node)
    path = work.path(node) if what in ("Attribute", "Name") else ""
    if path and path in _HOMES:
        yield node
        return
    if what == "Name" and node.value in ("cuda", "npu") and kind(work.parent(node)) == "Attribute":
        call = work.parent(work.parent(node))
        if kind(call) == "Call" and call.func is work.parent(node):  # x.cuda()
            yield node
            return
    if index_of(node) is not None:
        around: Any = work.parent(node)
        is_chosen = kind(around) == "IfExp" and "is_available()" in work.code(around.test)
        if is_chosen or is_device_place(work, node) is True:
            yield node
        return
    if text_of(node) in ("nccl", "hccl"):
        place, name = place_of(work, node)
        if name.endswith("init_process_group") or (place != "call" and "backend" in name):
            yield node
        return
    for each in work.source.children(node):
        yield from _certain(work, each)


def _truth(work: Work, test: Any) -> Any:
    """What a test that is a name stands for, where it is set once."""
    values = list(values_of(work, test))
    return values[0] if len(values) == 1 else test


def _asked(work: Work, test: Any, depth: int) -> Iterator[tuple[Node, str]]:
    """What a test asks for: the leaves that name a device, with its family; those of flags that were set before too."""
    what = kind(test)
    if what == "BooleanOperation":
        yield from _asked(work, test.left, depth)
        yield from _asked(work, test.right, depth)
    elif what == "UnaryOperation":
        yield from _asked(work, test.expression, depth)
    else:
        yield from _leaves(work, test)
        if depth < _DEEPEST:
            for value in values_of(work, test):
                yield from _asked(work, value, depth + 1)


def _leaves(work: Work, node: Any) -> Iterator[tuple[Node, str]]:
    """The texts and names below a node that name CUDA or Ascend."""
    what = kind(node)
    if what == "Attribute" or what == "Name":
        path = work.path(node)
        home = next((home for home in _HOMES if path == home or path.startswith(f"{home}.")), None)
        if home is not None or (what == "Attribute" and node.attr.value in ("is_cuda", "is_npu") and not path):
            yield node, _HOMES[home] if home is not None else _FAMILY[node.attr.value]
            return
    text = text_of(node)
    if what == "FormattedString" and kind(node.parts[0] if node.parts else None) == "FormattedStringText":
        text = node.parts[0].value + "0" * (len(node.parts) > 1)
    found = _TEXT.fullmatch(text or "")
    if found is not None:
        yield node, _FAMILY[found[1]]
        return
    for each in work.source.children(node):
        yield from _leaves(work, each)


def _only_asks(work: Work, test: Any) -> bool:
    """Whether a branch does nothing but call functions of ``torch.cuda`` or ``torch.npu``: twice is as good as once."""
    if kind(test) == "IfExp":
        return False
    lines = [line for each in test.body.body for line in (each.body if kind(each) == "SimpleStatementLine" else [each])]
    return all(
        kind(line) == "Expr" and kind(line.value) == "Call" and work.path(line.value.func).startswith(tuple(_HOMES))
        for line in lines
    )


RULES = (Apart(),)
