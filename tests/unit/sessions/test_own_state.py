"""``own = model.state_dict(); own[name].copy_(value)`` loads at each level, or is an error before anything trains.

Covers: xamp.scaling.handed_out, xamp.scaling.lost_writes, xamp.values.lowered.
"""

from __future__ import annotations

import collections
import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.errors import StateError
from xamp.values.lowered import handed_out

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{level: (level, {}) for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "O2 without masters": ("O2", {"master_weights": False}),
    "O5 without masters": ("O5", {"master_weights": False}),
}
COPIES = ("O3", "O2 without masters", "O5 without masters")
VALUE = 0.3  # which neither fp16 nor bf16 has


@pytest.fixture(autouse=True)
def _none_of_others() -> None:
    gc.collect()
    handed_out.clear()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("mean", torch.linspace(0.1, 0.4, 4))
        self.register_buffer("table", torch.linspace(0.1, 0.4, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        mean: Any = self.mean
        return self.last(self.first(x - mean))


class Run:
    def __init__(self, case: str, optimizer: bool = True) -> None:
        torch.manual_seed(0)
        level, options = CASES[case]
        self.model: Any = Net()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        make: Any = xamp.initialize
        make(self.model, self.optimizer if optimizer else None, level=level, verbosity=0, **options)
        self.own: Any = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        with xamp.scale_loss(self.model(torch.ones(3, 4)).square().mean(), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()

    def lost(self, value: float = VALUE) -> list[str]:
        found = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        found.pop("table")
        rounded = {name: torch.tensor(value).to(tensor.dtype) for name, tensor in found.items()}
        return [name for name, tensor in found.items() if not bool((tensor == rounded[name]).all())]


WRITES: dict[str, Callable[[Any], object]] = {
    "copy": lambda value: value.copy_(torch.full_like(value, VALUE)),
    "fill": lambda value: value.fill_(VALUE),
    "index": lambda value: value.__setitem__(..., VALUE),
    "slices": lambda value: (value.__setitem__(slice(1), VALUE), value[1:].fill_(VALUE)),
    "arithmetic": lambda value: value.zero_().__iadd__(VALUE),
    "init": lambda value: nn.init.constant_(value, VALUE),
    "views": lambda value: value.view(-1).detach().fill_(VALUE),
}


def write(own: Any, how: str = "copy") -> None:
    for value in own.values():
        WRITES[how](value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_into_a_state_dict_is_used_by_the_next_forward(case: str, how: str) -> None:
    run = Run(case)
    own = run.model.state_dict()
    write(own, how)
    with torch.no_grad():
        run.model(torch.ones(3, 4))
    assert run.lost() == []
    state = run.model.state_dict()
    assert all(torch.equal(value, torch.full_like(value, VALUE)) for value in state.values()) or case in COPIES
    assert all(bool((value - VALUE).abs().max() < 1e-3) for value in state.values())
    assert bool((state["mean"] == VALUE).all()), "of a buffer also the digits that only fp32 has"


@torch.inference_mode()
def inferred(model: Any) -> Any:
    return model(torch.ones(3, 4))


USES: dict[str, Callable[[Run], object]] = {
    "state_dict": lambda run: run.model.state_dict(),
    "a part's state_dict": lambda run: run.model.first.state_dict(),
    "xamp.state_dict": lambda run: xamp.state_dict(run.model),
    "step": Run.step,
    "deepcopy": lambda run: copy.deepcopy(run.model),
    "session": lambda run: xamp.session(run.model).engine,
    "inference": lambda run: inferred(run.model),
}


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("use", USES)
def test_whatever_uses_the_model_next_has_it(case: str, use: str) -> None:
    run = Run(case)
    own = run.model.state_dict()
    write(own)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    USES[use](run)
    assert run.lost() == []


@pytest.mark.parametrize("case", COPIES)
def test_a_model_that_is_closed_has_it(case: str) -> None:
    run = Run(case)
    own = run.model.state_dict()
    write(own)
    xamp.session(run.model).close()
    assert all(float((value - VALUE).abs().max()) < 1e-3 for value in own.values())
    weights = [p.detach() for p in run.model.parameters()]
    assert all(p.dtype == torch.float32 and float((p - VALUE).abs().max()) < 1e-3 for p in weights)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_from_there_as_after_load_state_dict(case: str) -> None:
    found = []
    for by_hand in (True, False):
        run = Run(case)
        run.step()
        state = {name: torch.full_like(value, VALUE) for name, value in run.model.state_dict().items()}
        if by_hand:
            own = run.model.state_dict()
            for name, value in own.items():
                value.copy_(state[name])
        else:
            run.model.load_state_dict(state)
        for _ in range(3):
            run.step()
        found.append({name: value.clone() for name, value in run.model.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("case", CASES)
def test_it_may_be_written_again_and_again_and_in_part(case: str) -> None:
    run = Run(case)
    own = run.model.state_dict()
    for value in (0.5, 0.25):
        own["first.weight"].fill_(value)
        run.model(torch.ones(3, 4))
        assert bool((run.model.first.weight == value).all())
    assert "last.weight" in run.lost(0.25)
    run.step()
    moved = run.model.first.weight.detach().clone()
    assert not bool((moved == 0.25).all())
    run.model(torch.ones(3, 4))
    assert torch.equal(run.model.first.weight, moved), "what was written once is not written again"


@pytest.mark.parametrize("case", [*COPIES, "O2"])
def test_a_copy_that_is_gone_with_what_was_written_is_an_error_once(case: str) -> None:
    run = Run(case)
    name = "mean" if case == "O2" else "first.weight"
    run.model.state_dict()[name].fill_(VALUE)
    with pytest.raises(StateError, match=rf"state_dict\(\)\['{name}'\].*it is a copy.*load_state_dict\(own\)"):
        run.model(torch.ones(3, 4))
    run.step()
    run.model(torch.ones(3, 4))


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("use", ["scale_loss", "state_dict", "xamp.state_dict"])
def test_nothing_trains_before_the_error(case: str, use: str) -> None:
    run = Run(case)
    loss = run.model(torch.ones(3, 4)).square().mean()
    uses: dict[str, Callable[[Run], object]] = {**USES}
    uses["scale_loss"] = lambda run: xamp.scale_loss(loss, run.optimizer)
    run.model.state_dict()["first.weight"].fill_(VALUE)
    with pytest.raises(StateError, match="it is a copy in fp32, and something was written into it"):
        uses[use](run)


@pytest.mark.parametrize("case", COPIES)
def test_what_is_loaded_counts_and_not_what_was_written_before(case: str) -> None:
    """As torch.distributed.checkpoint does: it writes into the entries, and the script loads them."""
    run = Run(case)
    own = run.model.state_dict()
    write(own)
    run.model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in own.items()})
    del own
    run.model(torch.ones(3, 4))
    assert run.lost(0.5) == []


@pytest.mark.parametrize("case", CASES)
def test_copies_are_not_kept_alive(case: str) -> None:
    run = Run(case)
    before = len(handed_out)
    own = run.model.state_dict()
    alive = [weakref.ref(value) for value in own.values()]
    storages = [weakref.ref(value.untyped_storage()) for value in own.values()]
    copies = len(handed_out) - before
    assert copies == (5 if case in COPIES else 0 if case in ("O0", "O1", "O4") else 1)
    del own
    assert len(handed_out) == before
    if case in COPIES:
        assert not any(ref() for ref in (*alive, *storages))
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in loaded.values())
    assert len(handed_out) == before


def test_what_is_handed_out_has_no_memory_of_its_own() -> None:
    run = Run("O3")
    own = run.model.state_dict()
    assert sum(one._counter.untyped_storage().nbytes() for one in handed_out) == 0
    assert len(handed_out) == len(own) == 5


@pytest.mark.parametrize("case", CASES)
def test_what_is_only_read_writes_nothing(case: str) -> None:
    run = Run(case)
    own = run.model.state_dict()
    collections.deque((value.sum(), value.clone().fill_(9.0)) for value in own.values())
    other: Any = Net()
    other.load_state_dict(own)
    other.load_state_dict(own, assign=True) if case not in ("O0", "O1", "O4") else None
    run.step()
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.model(torch.ones(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(weights, run.model.parameters(), strict=True))
    assert all(bool((p != VALUE).any()) for p in run.model.parameters())


@pytest.mark.parametrize("case", COPIES)
def test_one_of_inference_is_written_too(case: str) -> None:
    run = Run(case, optimizer=False)
    with torch.inference_mode():
        own = run.model.state_dict()
        write(own)
        run.model(torch.ones(3, 4))
    assert run.lost() == []


def test_a_model_that_is_gone_leaves_nothing_to_write() -> None:
    run = Run("O3")
    own = run.model.state_dict()
    write(own)
    del run
    gc.collect()
    other = Run("O3")
    other.model(torch.ones(3, 4))
    assert len(other.lost()) > 0


@pytest.mark.parametrize("case", COPIES)
def test_a_compiled_model_has_it(case: str) -> None:
    run = Run(case)
    compiled: Any = torch.compile(run.model, backend="eager")
    before = compiled(torch.ones(3, 4)).detach()
    own = run.model.state_dict()
    write(own)
    after = compiled(torch.ones(3, 4)).detach()
    assert run.lost() == []
    assert torch.equal(after, run.model(torch.ones(3, 4)))
    assert not torch.equal(after, before)


MOVES: dict[str, Callable[[Run], object]] = {
    "load": lambda run: run.model.load_state_dict(
        {name: torch.full_like(value, 0.5) for name, value in run.model.state_dict().items()}
    ),
    "loading itself": lambda run: run.model.load_state_dict(run.own),
    "step": Run.step,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("use", [*USES, "forward"])
def test_what_is_written_after_the_model_has_moved_on_loads_or_is_an_error(case: str, move: str, use: str) -> None:
    """A copy would bring back the old elements beside those that were written; the model's own tensor has the new."""
    run = Run(case)
    run.own = run.model.state_dict()
    MOVES[move](run)
    wanted = {name: value.clone() for name, value in run.model.state_dict().items()}
    wanted["first.weight"][0] = VALUE
    run.own["first.weight"][0] = VALUE
    uses: dict[str, Callable[[Run], object]] = {**USES, "forward": lambda run: run.model(torch.ones(3, 4))}
    if case in COPIES:
        with pytest.raises(
            StateError, match=r"\['first.weight'\].*before the model's last step or load.*load_state_dict\(own\)"
        ):
            uses[use](run)
        wanted["first.weight"] = run.model.state_dict()["first.weight"].clone()
        assert not bool((wanted["first.weight"][0] == VALUE).any())
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    uses[use](run)  # told once
    assert all(torch.equal(value, wanted[name]) for name, value in run.model.state_dict().items())
    own = run.model.state_dict()  # the cure
    own["first.weight"][0] = 0.25
    uses[use](run)
    assert bool((run.model.state_dict()["first.weight"][0] == 0.25).all())


def test_saving_asks_each_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts a model has: not each copy once for each part."""
    from xamp.scaling import handed_out as module

    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    xamp.initialize(model, level="O3", verbosity=0)
    own = model.state_dict()
    asked = collections.Counter[str]()
    is_written = module._Copy.is_written

    def counted(one: Any) -> bool:
        asked[one.key] += 1
        return is_written(one)

    monkeypatch.setattr(module._Copy, "is_written", counted)
    model.state_dict()
    assert {key: count for key, count in asked.items() if count > 2} == {}  # the second time where a copy goes
    assert set(asked) == set(own)


def test_tied_weights_have_two_names() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    xamp.initialize(model, level="O3", verbosity=0)
    own = model.state_dict()
    for name in own:
        own[name].copy_(torch.full((4, 4), 3.0))
    model(torch.ones(1, 4))
    assert torch.equal(model[0].weight.float(), torch.full((4, 4), 3.0))
