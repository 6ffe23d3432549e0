"""Models and optimizers of classes whose first base has no ``__dict__``: taken like any other.

Covers: xamp.sessions.pickles, xamp.casting.forward, xamp.values.class_swap.
"""

from __future__ import annotations

import abc
import copy
import pickle
import typing
from typing import Any

import compiling
import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
Kind = typing.TypeVar("Kind")
subclassed: list[type] = []
registered: dict[str, type] = {}


class Shape(typing.Protocol):
    def area(self) -> float: ...


class NoDict:
    __slots__ = ()


class OneSlot:
    __slots__ = ("one",)


class Counts:
    """A base that must hear of each subclass of the user's, and of no other."""

    def __init_subclass__(cls, *, named: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        subclassed.append(cls)


class Abstract(abc.ABC, nn.Linear):
    @abc.abstractmethod
    def name(self) -> str: ...


class OfAbstract(Abstract):
    def name(self) -> str:
        return "mine"


class AbstractFirst(abc.ABC, nn.Linear): ...


class AbstractLast(nn.Linear, abc.ABC): ...


class GenericFirst(typing.Generic[Kind], nn.Linear): ...


class ProtocolFirst(Shape, nn.Linear):
    def area(self) -> float:
        return 6.0


class NoDictFirst(NoDict, nn.Linear): ...


class OneSlotFirst(OneSlot, nn.Linear): ...


class Counted(Counts, nn.Linear, named="counted"): ...


class AbstractCounted(abc.ABC, Counts, nn.Linear, named="counted"): ...


class Registry(type):
    """Has each class of the user's by its name, and lets nobody change one."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        registered[cls.__name__] = cls

    def __setattr__(cls, name: str, value: object) -> None:
        if not name.startswith(("__", "_abc")):  # these are Python's
            raise AttributeError(f"{cls.__name__} is frozen")
        super().__setattr__(name, value)


class AbstractRegistry(Registry, abc.ABCMeta): ...


class Registered(nn.Linear, metaclass=Registry): ...


class AbstractRegistered(abc.ABC, nn.Linear, metaclass=AbstractRegistry): ...


class RegisteredSGD(SGD, metaclass=Registry): ...


class AbstractSGD(abc.ABC, SGD): ...


class NoDictSGD(NoDict, SGD): ...


MODELS = [
    *(OfAbstract, AbstractFirst, AbstractLast, GenericFirst, ProtocolFirst, NoDictFirst, OneSlotFirst),
    *(Counted, AbstractCounted, Registered, AbstractRegistered),
]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, level: str) -> dict[str, torch.Tensor]:
    xamp.initialize(model, optimizer, level, verbosity=0, loss_scale=64.0)
    for _ in range(3):
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_a_model_trains_as_its_plain_twin(cls: type[nn.Linear], level: str) -> None:
    torch.manual_seed(1)
    model = cls(3, 2)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    subclassed.clear()
    found = trained(model, SGD(model.parameters(), lr=0.125), level)
    expected = trained(twin, SGD(twin.parameters(), lr=0.125), level)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert isinstance(model, cls)
    assert subclassed == []
    assert registered.get(cls.__name__, cls) is cls
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert type(pickle.loads(pickle.dumps(model))) is cls
    compiling.forget()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), model(X))
    xamp.session(model).close()
    assert type(model) is cls


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize("cls", [AbstractSGD, NoDictSGD, RegisteredSGD], ids=lambda cls: cls.__name__)
def test_an_optimizer_steps_as_its_plain_twin(cls: type[SGD], level: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizer = cls(model.parameters(), lr=0.125, momentum=0.5)
    found = trained(model, optimizer, level)
    expected = trained(twin, SGD(twin.parameters(), lr=0.125, momentum=0.5), level)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert isinstance(optimizer, cls)
    xamp.session(model).close()
    assert type(optimizer) is cls


def test_a_class_made_of_a_managed_one_is_as_python_says() -> None:
    model = AbstractFirst(3, 2)
    xamp.initialize(model, level="O4", verbosity=0)

    class Derived(type(model)):  # type: ignore[misc]
        pass

    assert Derived.__mro__[1:] == type(model).__mro__


def test_a_class_that_is_pickled_by_value_takes_no_managed_class_along() -> None:
    """As cloudpickle does: by what ``vars`` has. A worker process need not have xamp."""

    class Net(nn.Linear): ...

    before = dict(vars(Net))
    xamp.initialize(Net(3, 2), level="O4", verbosity=0)
    added = {name: value for name, value in vars(Net).items() if name not in before}
    assert added
    assert [pickle.loads(pickle.dumps(value)) for value in added.values()] == [[]] * len(added)
    assert b"xamp" not in pickle.dumps(list(added.values()))
