"""What can never run on another device: :mod:`xamp.port.vendor_only` has the table."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from xamp.port.places import is_spoken
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.builds import is_caught
from xamp.port.scopes import dotted
from xamp.port.source import kind, text_of
from xamp.port.vendor_names import call_of, library_of, package_of
from xamp.port.vendor_only import ATTRIBUTES, COMMANDS, RESOURCE, TEXTS, Name
from xamp.port.work import Work

__all__ = ["RULES"]

_COMMAND = re.compile(rf"(?<![\w.-])(?:{'|'.join(sorted(COMMANDS, key=len, reverse=True))})(?![\w.-])")
_TEXTS = tuple((re.compile(pattern), text) for pattern, text in TEXTS)
_RUNS = {
    *("run", "call", "check_call", "check_output", "Popen", "system", "popen", "getoutput", "getstatusoutput", "which"),
    *("create_subprocess_exec", "create_subprocess_shell", "spawn", "execvp", "execv", "sh", "run_cmd", "exec_command"),
}
_LOOKS_UP = (
    *("find_spec", "import_module", "__import__", "find_loader", "importorskip", "is_installed", "require"),
    *("is_package_available", "_is_package_available"),
)
_RESOURCES = ("resources", "bundles")
_LISTS = ("install_requires", "extras_require", "setup_requires", "tests_require", "requirements", "dependencies")


def _text_of(path: str, own: Collection[str] = ()) -> str:
    """What is said of a name of a library; empty where it belongs to none, or to a module of the project (``own``)."""
    known = None if path.partition(".")[0] in own else library_of(path)
    return f"{known[0]}: {known[1].instead}" if known is not None else ""


class Libraries(Rule):
    """A library for one vendor's devices gets a note at the import, with what to use instead where something exists.

    In a `try` that catches the failure, the note does not count as unsupported. Uses of the library are listed in the
    report. So are names of other libraries that use CUDA (`torch.version.cuda`), programs of a vendor that a script
    starts (`nvidia-smi`), and packages that setup.py asks for.
    """

    name = "one-vendor"
    grade = Grade.UNSUPPORTED
    met = 2
    kinds = ("Import", "ImportFrom", "Name", "Attribute", "SimpleString", "FormattedStringText", "Arg")
    examples = (
        Example(
            "from numba import cuda\n\n\n@cuda.jit\ndef add(a, b):\n    pass\n",
            f"# TODO(xamp): {_text_of('numba.cuda')}\nfrom numba import cuda\n\n\n"
            "@cuda.jit\ndef add(a, b):\n    pass\n",
        ),
        Example(
            "try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n",
            f"try:\n    # TODO(xamp): {_text_of('flash_attn')}\n    import flash_attn\n"
            "except ImportError:\n    flash_attn = None\n",
        ),
        Example(
            "import subprocess\nout = subprocess.check_output(['nvidia-smi', '-L'])\n",
            f"import subprocess\n# TODO(xamp): nvidia-smi: {COMMANDS['nvidia-smi']}\n"
            "out = subprocess.check_output(['nvidia-smi', '-L'])\n",
        ),
    )
    unchanged = (
        "from numba import njit\nfrom mine import cupy\nprint('run nvidia-smi first')\n",
        "# import spconv\ntriton = 1\n",
        "a = x.__array_interface__\nb = x.cuda_array_interface\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        what = kind(node)
        if work.is_kept(self, node):
            return
        if what in ("Import", "ImportFrom"):
            self._import(node, work)
        elif what in ("Name", "Attribute"):
            self._use(node, work)
        elif what == "Arg":
            self._profile(node, work)
        else:
            self._text(node, work)

    def _import(self, node: Any, work: Work) -> None:
        start = ""
        if kind(node) == "ImportFrom":
            if node.relative or node.module is None:
                return
            start = f"{dotted(node.module)}."
            if kind(node.names) == "ImportStar":
                self._import_one(start[:-1], node, work)
                return
        for alias in node.names:
            self._import_one(start + dotted(alias.name), alias, work)

    def _import_one(self, path: str, node: Any, work: Work) -> None:
        if text := _text_of(path, work.own):
            work.say(self, node, Grade.NOTED if is_caught(work, node) else Grade.UNSUPPORTED, text)
        elif (named := call_of(path)) is not None:
            self._say_call(path, named, node, work)

    def _use(self, node: Any, work: Work) -> None:
        """A chain of names; the import says the same of a library, so its uses are in the report only."""
        if kind(node) == "Attribute" and node.attr.value in ATTRIBUTES:
            work.say(self, node, Grade.NOTED, ATTRIBUTES[node.attr.value])
            return
        parent = work.parent(node)
        if (kind(parent) == "Attribute" and parent.value is node) or not work.scopes.knows(node):
            return
        if kind(node) == "Name" and not work.scopes.is_use(node):
            return
        path = work.path(node)
        if not path or path.startswith("."):
            return
        if text := _text_of(path, work.own):
            ref = work.resolve(node)
            caught = ref is not None and any(is_caught(work, each.node) for each in ref.bindings if each.path)
            work.say(self, node, Grade.NOTED if caught else Grade.UNSUPPORTED, text, inline=False)
        elif (named := call_of(path)) is not None:
            self._say_call(path, named, node, work)

    def _say_call(self, path: str, named: Name, node: Any, work: Work) -> None:
        grade = Grade.UNSUPPORTED if named.never_runs and not is_caught(work, node) else Grade.NOTED
        work.say(self, node, grade, f"{'.'.join(path.split('.')[-2:])}: {named.text}")

    def _profile(self, node: Any, work: Work) -> None:
        """``profile(use_cuda=True)``."""
        call = work.parent(node)
        if node.keyword is None or node.keyword.value != "use_cuda" or kind(call) != "Call":
            return
        if "profile" in work.code(call.func).lower() and work.code(node.value) != "False":
            work.say(self, node, Grade.NOTED, _PROFILED)

    def _text(self, node: Any, work: Work) -> None:
        text = node.value if kind(node) == "FormattedStringText" else node.value[1:-1]
        whole = text_of(node) or ""
        if self._names_package(node, whole, work) or self._looks_up(node, whole, work):
            return
        if whole == "NPU" and self._is_resource(node, work):
            work.say(self, node, Grade.NOTED, RESOURCE)
            return
        runs = self._is_run(node, work)
        if kind(work.parent(node)) == "Expr" or (is_spoken(work, node) and not runs):
            return
        if runs and self._installs(node, text, work):
            return
        if found := _COMMAND.search(text):
            grade = Grade.UNSUPPORTED if runs or text.startswith(found[0]) else Grade.NOTED
            work.say(self, node, grade, f"{found[0]}: {COMMANDS[found[0]]}")
        for pattern, hint in _TEXTS:
            if pattern.search(text):
                work.say(self, node, Grade.NOTED, hint)

    def _installs(self, node: Any, text: str, work: Work) -> bool:
        """``pip install flash-attn``, as one text or as one of a list of words."""
        calls = (each for each in work.source.above(node) if kind(each) == "Call")
        words = re.sub(r"[\"',\[\]]+", " ", work.code(next(calls)))
        if not re.search(r"\b(?:pip[\d.]*|conda|mamba|uv)\b.*\b(?:install|add)\b", words, re.S):
            return False
        for found in re.findall(r"[A-Za-z][\w.-]*", text):
            library = package_of(word := found.removesuffix(".git"))
            if library is not None and library.modules:
                work.say(self, node, Grade.UNSUPPORTED, f"{word}: {library.instead}")
                return True
        return False

    def _is_run(self, node: Any, work: Work) -> bool:
        """Whether a text is, or is part of, what a call starts."""
        for each in work.source.above(node):
            if kind(each) == "Call" and work.code(each.func).rpartition(".")[2] in _RUNS:
                return True
            if kind(each) in ("SimpleStatementLine", "FunctionDef", "ClassDef"):
                return False
        return False

    def _is_resource(self, node: Any, work: Work) -> bool:
        """Whether a text is a key of what Ray is asked for: ``resources={"NPU": 1}``."""
        if kind(work.parent(node)) != "DictElement":
            return False
        for each in work.source.above(node):
            if kind(each) == "Arg" and each.keyword is not None:
                return each.keyword.value in _RESOURCES
            if kind(each) == "Assign":
                return work.code(each.targets[0].target) in _RESOURCES
        return False

    def _looks_up(self, node: Any, text: str, work: Work) -> bool:
        """``import_module("cupy")``."""
        arg = work.parent(node)
        call = work.parent(arg)
        note = _text_of(text, work.own)
        if kind(arg) != "Arg" or kind(call) != "Call" or not note:
            return False
        if work.code(call.func).rpartition(".")[2] not in _LOOKS_UP:
            return False
        work.say(self, node, Grade.NOTED, note)
        return True

    def _names_package(self, node: Any, text: str, work: Work) -> bool:
        """A package that setup.py asks for."""
        found = re.match(r"[A-Za-z][\w.-]*", text)
        library = package_of(found[0]) if found else None
        if found is None or library is None:
            return False
        for each in work.source.above(node):
            if kind(each) == "Arg" and each.keyword is not None and each.keyword.value in _LISTS:
                break
            if kind(each) == "Assign" and work.code(each.targets[0].target).lower() in _LISTS:
                break
            if kind(each) in ("Call", "SimpleStatementLine"):
                return False
        else:
            return False
        work.say(self, node, Grade.UNSUPPORTED, f"{found[0]}: {library.instead}")
        return True


_PROFILED = "counts CUDA's time only; torch.profiler.profile takes the activities of the device in use"

RULES = (Libraries(),)
