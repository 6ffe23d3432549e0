"""Makes TorchScript compile the original of a replaced function, and refuse models that are under a policy."""

from __future__ import annotations

import types
import weakref
from typing import Any, NoReturn

from xamp.errors import StateError
from xamp.policy import levels_where, listed
from xamp.torch_compat.torch_private import script

__all__ = ["forget_script", "refuse_script", "tell_script"]


def refuse_script() -> NoReturn:
    """Refuse ``torch.jit.script`` of a model under a policy, or of a module that holds one.

    Raises:
        StateError: always.
    """
    scripted = listed(levels_where(lambda row: not row.casts_parameters), "and")
    raise StateError(
        "torch.jit.script on a model that xamp.initialize manages would leave its policy out of the compiled code. "
        f"Script the plain model and give initialize the ScriptModule, which {scripted} take. Or use torch.jit.trace "
        "or torch.export.export, which keep the policy. Or call xamp.session(model).close() first."
    )


def tell_script(function: Any, wrapper: Any) -> None:
    """Make TorchScript compile ``function`` where it meets ``wrapper``, which replaces it."""
    op = script.builtins().get(id(function))
    if op is not None:
        script.builtins()[id(wrapper)] = op
        # Also where nobody calls forget_script, as where other code replaces the wrapper: a later function gets its id.
        weakref.finalize(wrapper, _forget, id(wrapper)).atexit = False
    dispatched = script.boolean_dispatched
    if isinstance(function, types.FunctionType) and function in dispatched:
        dispatched[wrapper] = dispatched[function]
    if isinstance(wrapper, types.FunctionType):
        wrapper.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]


def forget_script(wrapper: Any) -> None:
    """Make TorchScript forget what :func:`tell_script` told of ``wrapper``."""
    _forget(id(wrapper))


def _forget(identity: int) -> None:
    script.builtins().pop(identity, None)
