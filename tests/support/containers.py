"""Containers of every kind that goes in and out of ``forward``, and functions that inspect them."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pack_padded_sequence


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Checked(Point):
    """A named tuple whose constructor does not take its fields."""

    def __new__(cls, both: Any) -> Checked:
        return super().__new__(cls, both, both)


class Sparse(NamedTuple):
    """A named tuple that gives the fields that are set."""

    x: Any
    y: Any = None

    def __iter__(self) -> Any:
        return (item for item in tuple.__iter__(self) if item is not None)


class Prefixed(dict[str, Any]):
    """A dict that gives its items by other names."""

    def items(self) -> Any:
        return [(f"a.{key}", item) for key, item in super().items()]


class MyDict(dict[str, Any]):
    note = ""


class MyList(list[Any]):
    note = ""


class MyTuple(tuple[Any, ...]):
    note = ""


class Noted(Point):
    """A named tuple that has attributes too."""


class AttributeDict(dict[str, Any]):
    """Its items are its attributes, and the other way round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Locked(dict[str, Any]):
    """Nothing may be written into it after it was made."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("locked")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("locked")


class LockedList(list[Any]):
    """Nothing may be written into it after it was made."""

    def __setitem__(self, at: Any, value: Any) -> None:
        raise TypeError("locked")

    def append(self, value: Any) -> None:
        raise TypeError("locked")


class SlotDict(dict[str, Any]):
    """Its attribute is in a slot."""

    __slots__ = ("note",)


class ItemDict(dict[str, Any]):
    """Reads and writes its items as attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class OfState:
    """Refuses to be copied as Python copies."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no copies")


class Uncopied(OfState, dict[str, Any]):
    note = ""


class Encoding(UserDict[str, Any]):
    """A class like the one that a Hugging Face tokenizer returns."""

    def __init__(self, data: Any = None, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, item: str) -> Any:
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclasses.dataclass
class PostInit:
    x: Any
    seed: dataclasses.InitVar[int]
    made: Any = dataclasses.field(init=False)

    def __post_init__(self, seed: int) -> None:
        assert self.x.dtype == torch.float32, "made once, of fp32"
        self.made = self.x + seed


@dataclasses.dataclass(init=False)
class OwnInit:
    x: Any
    made: Any

    def __init__(self, both: Any) -> None:
        assert both.dtype == torch.float32, "made once, of fp32"
        self.x, self.made = both, both + 1


class ModelOutput(OrderedDict[str, Any]):
    """A copy of transformers' class of that name, as a container."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use ``update`` on a ModelOutput instance.")

    def pop(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use ``pop`` on a ModelOutput instance.")

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        make, _, *rest = tuple(super().__reduce__())
        args = tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return make, args, *rest

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self)


@dataclasses.dataclass
class ClassifierOutput(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden_states: Any = None


def with_attributes(made: Any) -> Any:
    made.note = "kept"
    return made


def floats() -> torch.Tensor:
    return torch.tensor([1.5, -2.0])


MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda t: (t, 1),
    "list": lambda t: [t, 1],
    "dict": lambda t: {"x": t, "y": 1},
    "OrderedDict": lambda t: OrderedDict([("b", 1), ("a", t)]),
    "defaultdict": lambda t: defaultdict(list, x=t),
    "Counter": lambda t: collections.Counter({"x": t}),
    "dict subclass": lambda t: with_attributes(MyDict(x=t)),
    "list subclass": lambda t: with_attributes(MyList([t])),
    "tuple subclass": lambda t: with_attributes(MyTuple([t])),
    "UserDict subclass": lambda t: Encoding({"x": t}, encodings=["kept"]),
    "named tuple": lambda t: Point(t, "y"),
    "named tuple not made from its fields": Checked,
    "named tuple with an own __iter__": Sparse,
    "dict with own items()": lambda t: Prefixed(x=t),
    "struct sequence": lambda t: t.max(dim=0),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "dataclass with __post_init__": lambda t: PostInit(t, 1),
    "ModelOutput": lambda t: ClassifierOutput(logits=t),
    "PackedSequence": lambda t: pack_padded_sequence(t.reshape(1, 2, 1), [2], batch_first=True),
    "named tuple with attributes": lambda t: with_attributes(Noted(t, 1)),
    "dict that is its __dict__": lambda t: AttributeDict(x=t, y=1),
    "dict that refuses": lambda t: Locked(x=t),
    "list that refuses": lambda t: LockedList([t, 1]),
    "dict with slots": lambda t: with_attributes(SlotDict(x=t)),
    "dict of items as attributes": lambda t: ItemDict(x=t),
    "dict that is not pickled": lambda t: with_attributes(Uncopied(x=t)),
    "UserList": lambda t: collections.UserList([t]),
    "dataclass with an own __init__": OwnInit,
    "nested": lambda t: {"a": [Point(t, (t, {"b": Plain(t)}))], "c": ClassifierOutput(hidden_states=(t, t))},
}


def leaves(value: Any) -> list[Any]:
    """All values in ``value`` that are not containers, in order."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, collections.UserList):
        return leaves(value.data)
    if isinstance(value, (dict, UserDict)):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name))]
    return [value]


def shape(value: Any) -> Any:
    """The types of ``value`` and of its items, with keys and attributes."""
    if isinstance(value, (tuple, list)):
        return type(value), [shape(item) for item in value], getattr(value, "note", None)
    if isinstance(value, collections.UserList):
        return type(value), shape(value.data)
    if isinstance(value, ItemDict):
        return type(value), [(k, shape(v)) for k, v in value.items()]
    if isinstance(value, (dict, UserDict)):
        rest = (getattr(value, "default_factory", None), getattr(value, "_encodings", None))
        return type(value), [(k, shape(v)) for k, v in value.items()], getattr(value, "note", None), rest
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [(f.name, shape(getattr(value, f.name))) for f in dataclasses.fields(value)]
    return type(value)
