"""Gives an object a subclass of its own class, so that methods change and the object stays the same.

Python allows ``obj.__class__ = made`` where both classes have the same memory layout. A class ``made(mixin, base)``
mostly has the layout of ``base``. It has another one where the first base of ``base`` has no ``__dict__``
(``abc.ABC``, ``typing.Generic``, ``typing.Protocol``, a mixin with empty ``__slots__``). Then ``base`` must come first
among the bases, and a metaclass puts the mixin first in the order of methods all the same.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

__all__ = ["make_class", "make_subclass", "set_class"]


def make_subclass(base: type, mixin: type, namespace: dict[str, Any]) -> type:
    """A subclass of ``base`` that its instances can be given; methods are looked up in ``mixin`` before ``base``.

    Args:
        base: the class of an object.
        mixin: a class with methods; its ``__init_subclass__`` keeps that of ``base`` from running.
        namespace: what the subclass itself defines.

    Raises:
        TypeError: ``base`` admits no subclass.
    """
    if _gets_its_dict_first(base):
        return make_class(type(base), base.__name__, (mixin, base), namespace)
    return make_class(_mixin_first(type(base), mixin), base.__name__, (base, mixin), namespace)


def make_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Make a class without ``__init__`` of the user's metaclasses, which may keep a registry of the user's classes.

    Raises:
        TypeError: ``__new__`` of a metaclass refuses the class.
    """
    known = next(m for m in metaclass.__mro__ if m.__module__.partition(".")[0] in sys.stdlib_module_names)
    try:
        made: type = metaclass.__new__(metaclass, name, bases, namespace)
    except TypeError:
        raise
    except Exception as error:
        raise TypeError(f"its metaclass refuses a subclass: {error}") from error
    known.__init__(made, name, bases, namespace)  # type: ignore[misc]
    return made


def set_class(found: object, cls: type) -> None:
    """Assign ``found.__class__``, also where the object hands attribute assignments on to another one.

    Raises:
        TypeError: the layouts differ.
    """
    object.__setattr__(found, "__class__", cls)


def _gets_its_dict_first(base: type) -> bool:
    """Whether, along ``base.__base__``, the class that adds ``__dict__`` derives from ``object`` directly."""
    cls = base
    while cls.__base__ is not None and cls.__base__.__dictoffset__ != 0:
        cls = cls.__base__
    return cls.__base__ is object


@functools.cache
def _mixin_first(metaclass: type, mixin: type) -> type:
    """A metaclass for classes ``made(base, mixin)`` in which ``mixin`` comes before ``base`` all the same."""
    default: Any = metaclass.mro  # unbound: it takes the class

    def mro(cls: type) -> list[type]:
        order: list[type] = default(cls)
        if cls.__bases__[-1] is not mixin:
            return order  # a user's subclass of such a class, where the order is right by now
        return [cls, mixin, *(other for other in order if other not in (cls, mixin))]

    made: type = type(metaclass)(metaclass.__name__, (metaclass,), {"mro": mro, "__module__": metaclass.__module__})
    return made
