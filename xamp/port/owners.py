"""Whose attribute stands in a script: a tensor's, as far as the file tells. A name alone tells nothing.

``x.is_cuda`` may be asked of a tensor, of options (``args.is_cuda``) or of an object of the script's own. Only what
makes a tensor, or what is used as only a tensor is, decides.
"""

from __future__ import annotations

import re
from typing import Any

from xamp.port.places import last_name
from xamp.port.receivers import OWN, assigned, doubt_about
from xamp.port.scopes import Binding
from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["given", "is_tensor", "short"]

_MADE_BY = (
    "tensor zeros ones empty full arange linspace logspace eye rand randn randint randperm normal bernoulli from_numpy "
    "as_tensor asarray zeros_like ones_like empty_like full_like rand_like randn_like randint_like clone cat stack "
    "concat where matmul bmm mm mv einsum exp log sqrt abs clamp sum mean sigmoid tanh softmax sparse_coo_tensor "
    "Tensor FloatTensor DoubleTensor HalfTensor LongTensor IntTensor ByteTensor BoolTensor Parameter Variable"
)
_METHODS = (
    "unsqueeze unsqueeze_ requires_grad_ data_ptr numel contiguous is_contiguous type_as new_zeros new_ones new_tensor "
    "new_full new_empty new masked_fill masked_fill_ masked_select index_select permute expand expand_as view view_as "
    "reshape_as detach detach_ copy_ fill_ zero_ scatter_ scatter_add_ gather argmax softmax log_softmax sigmoid "
    "nelement storage_offset get_device size dim float double long cpu half bfloat16 is_floating_point t "
    "squeeze matmul bmm mm"
)
_ANSWERS = "size item tolist numpy dim stride get_device data_ptr numel nelement type is_contiguous"
_MAKERS = frozenset(_MADE_BY.split())  # names of torch whose calls give a tensor
_ONLY = frozenset(_METHODS.split())  # methods that tensors have, and options do not
_LEADS_OUT = frozenset(_ANSWERS.split())  # methods of a tensor that give something else
_ASKED = (
    "parameters named_parameters buffers modules named_modules children state_dict load_state_dict train eval zero_grad"
)
_MODULE = frozenset(_ASKED.split())  # methods that modules have, and tensors do not
_RETURNS = ("cuda", "npu", "to", "cpu", "half", "float", "bfloat16", "double", "train", "eval")  # the module itself
_PARTS = ("data", "grad", "T", "mT", "real", "imag")
_WRITTEN = re.compile(r"\b(?:\w*Tensor|Parameter|Variable)\b")
_BOXED = re.compile(r"(?i)\b(?:list|tuple|dict|sequence|iterable|mapping|callable|type)\b")
_DEEPEST = 5


def short(work: Work, node: Node) -> str:
    """The text of a node in one line, for a note; what stands before its last name is left out where it is long."""
    text = " ".join(work.code(node).split())
    return text if len(text) <= 40 else f"(...).{last_name(work, node)}"


def is_tensor(work: Work, node: Any, depth: int = 0) -> bool:
    """Whether an expression is known to be a tensor."""
    what = kind(node)
    if depth > _DEEPEST:
        return False
    if what == "Name":
        return _is_name(work, node, depth)
    if what == "Attribute":
        if node.attr.value in _PARTS and is_tensor(work, node.value, depth + 1):
            return True
        values = assigned(work, node.attr.value)
        return bool(values) and all(is_tensor(work, each, depth + 1) for each in values)
    if what == "Call":
        return _is_result(work, node, depth)
    if what == "Subscript":
        return is_tensor(work, node.value, depth + 1)
    if what == "UnaryOperation":
        return kind(node.operator) != "Not" and is_tensor(work, node.expression, depth + 1)
    if what == "BinaryOperation":
        return is_tensor(work, node.left, depth + 1) or is_tensor(work, node.right, depth + 1)
    return what == "IfExp" and all(is_tensor(work, each, depth + 1) for each in (node.body, node.orelse))


def _is_result(work: Work, call: Any, depth: int) -> bool:
    path = work.path(call.func)
    if path.startswith("torch."):
        return path.rpartition(".")[2] in _MAKERS or path.startswith("torch.nn.functional.")
    if work.code(call.func) == "next" and len(call.args) == 1:
        return _holds_weights(call.args[0].value)
    if kind(call.func) != "Attribute":
        return False
    name, receiver = call.func.attr.value, call.func.value
    if name in ("cuda", "npu"):
        return doubt_about(work, call.func) == "" and not _is_object(work, receiver)
    if name in _LEADS_OUT:
        return False
    return name in _ONLY or is_tensor(work, receiver, depth + 1)


def _is_object(work: Work, node: Any, depth: int = 0) -> bool:
    """Whether a class is called, as in ``Net().eval()``: a module has no ``is_cuda`` but one of the script's own."""
    while kind(node) == "Call" and kind(node.func) == "Attribute" and node.func.attr.value in _RETURNS:
        node = node.func.value
    if kind(node) == "Name" and depth < _DEEPEST:
        return any(_is_object(work, each.value, depth + 1) for each in work.scopes.bindings(node) if each.value)
    name = last_name(work, node.func) if kind(node) == "Call" else ""
    return name[:1].isupper() and name not in _MAKERS


def _holds_weights(node: Any) -> bool:
    """``model.parameters()``."""
    return kind(node) == "Call" and kind(node.func) == "Attribute" and node.func.attr.value in ("parameters", "buffers")


def _is_name(work: Work, name: Any, depth: int) -> bool:
    bindings = work.scopes.bindings(name)
    if any(kind(each.node) in ("ImportAlias", "ClassDef", "FunctionDef") for each in bindings):
        return False
    known = [_is_bound(work, each, depth) for each in bindings if not _is_from(given(work, each), name.value)]
    uses = _uses(work, name, bindings)
    if False in known or any(_is_module_use(work, use) for use in uses):
        return False
    return (bool(known) and all(known)) or any(_is_use(work, use) for use in uses)


def _is_from(value: Any, name: str) -> bool:
    """Whether a value is what a method of the object of that name gives, as in ``x = x.to(d)``."""
    while kind(value) == "Call" and kind(value.func) == "Attribute" and value.func.attr.value not in _LEADS_OUT:
        value = value.func.value
    return kind(value) == "Name" and value.value == name


def given(work: Work, binding: Binding) -> Any:
    """The value of an assignment, also the ``b`` that ``y`` gets in ``x, y = a, b``; None where there is none."""
    element = work.parent(binding.node)
    targets = work.parent(element)
    assign = work.parent(work.parent(targets))
    if binding.value is not None or kind(targets) != "Tuple" or kind(assign) != "Assign":
        return binding.value
    values = getattr(assign.value, "elements", ())
    pairs = zip(targets.elements, values, strict=True) if len(values) == len(targets.elements) else ()
    return next((given.value for target, given in pairs if target is element), None)


def _is_bound(work: Work, binding: Binding, depth: int) -> bool | None:
    """Whether what binds a name makes it a tensor; False where it makes it something else, None where that is open."""
    node: Any = binding.node
    if binding.how == "parameter":
        return _is_parameter(work, node)
    value = given(work, binding)
    if value is not None:
        if is_tensor(work, value, depth + 1):
            return True
        return False if kind(value) in _PLAIN or _makes_own(work, value) else None
    loop: Any = next(
        (each for each in work.source.above(node) if kind(each) in ("For", "CompFor", "With", "Assign")), None
    )
    if kind(loop) in ("For", "CompFor") and loop.target is node:
        return True if _holds_weights(loop.iter) or is_tensor(work, loop.iter, depth + 1) else None
    return None


_PLAIN = ("Integer", "Float", "SimpleString", "FormattedString", "Dict", "List", "Tuple", "Lambda")


def _makes_own(work: Work, value: Any) -> bool:
    """Whether a value is an object of a class of the file, or what a parser of options gives."""
    if kind(value) != "Call":
        return False
    code = work.code(value.func)
    bound = work.scopes.bindings(value.func) if kind(value.func) == "Name" else []
    if "parse" in code or _is_object(work, value):
        return True
    return any(kind(each.node) == "ClassDef" for each in bound)


def _is_parameter(work: Work, param: Any) -> bool | None:
    if param.annotation is not None:
        written = work.code(param.annotation)
        return _WRITTEN.search(written) is not None and _BOXED.search(written) is None
    function = work.parent(work.parent(param))
    names = [each.name.value for each in getattr(function.params, "params", ())]
    if kind(function) == "FunctionDef" and function.name.value == "backward" and names[:1] == ["ctx"]:
        return bool(param.name.value != "ctx")  # gradients
    return False if param.name.value in ("self", "cls", "ctx") else None


def _uses(work: Work, name: Any, bindings: list[Binding]) -> list[Node]:
    if bindings:
        return [use for each in bindings for use in work.scopes.uses.get(each, [])]
    same = (node for node in work.source.nodes if kind(node) == "Name" and node.value == name.value)
    return [node for node in same if not work.scopes.bindings(node)]


def _is_module_use(work: Work, use: Node) -> bool:
    """Whether a use is one that only a module has: ``x.parameters()``."""
    parent = work.parent(use)
    is_method = kind(parent) == "Attribute" and parent.value is use and parent.attr.value in _MODULE
    return is_method and kind(work.parent(parent)) == "Call" and work.parent(parent).func is parent


def _is_use(work: Work, use: Node) -> bool:
    """Whether a use is one that only a tensor has: ``x.unsqueeze(0)``, ``functional.relu(x)``."""
    parent = work.parent(use)
    if kind(parent) == "Arg" and kind(work.parent(parent)) == "Call":
        call = work.parent(parent)
        path = work.path(call.func)
        return call.args[0] is parent and (path.startswith("torch.nn.functional.") or path.endswith("_like"))
    if kind(parent) != "Attribute" or parent.value is not use:
        return False
    call = work.parent(parent)
    if kind(call) != "Call" or call.func is not parent:
        return False
    if parent.attr.value in ("cuda", "npu"):
        return doubt_about(work, parent) != OWN
    name = parent.attr.value
    return name in _ONLY and f"def {name}(".encode() not in work.source.data
