"""What a call has changed is taken back newest first; what cannot be taken back is kept, and raised.

Covers: xamp.values.undo.
"""

from __future__ import annotations

import weakref

import pytest

from xamp.values.undo import Undo


class _Fails:
    """A step that raises so many times, and then notes its name."""

    def __init__(self, name: str, times: int, done: list[str]) -> None:
        self.name, self.times, self.done = name, times, done

    def __call__(self) -> None:
        if self.times:
            self.times -= 1
            raise (KeyboardInterrupt if self.times % 2 else ValueError)(self.name)
        self.done.append(self.name)


def undo_with(done: list[str], **times: int) -> Undo:
    undo = Undo()
    undo.steps.extend(_Fails(name, count, done) for name, count in times.items())
    return undo


def test_the_newest_change_is_undone_first() -> None:
    done: list[str] = []
    undo = undo_with(done, a=0, b=0, c=0)
    undo.unwind()
    assert done == ["c", "b", "a"]
    assert undo.steps == []


def test_a_step_that_raises_runs_again_and_its_error_comes_at_the_end() -> None:
    done: list[str] = []
    undo = undo_with(done, a=0, b=1, c=0)
    with pytest.raises(ValueError, match=r"^b$"):
        undo.unwind()
    assert done == ["c", "b", "a"]
    assert undo.steps == []


def test_steps_that_raise_twice_stay_in_their_order_for_the_next_call() -> None:
    done: list[str] = []
    undo = undo_with(done, a=0, b=2, c=0, d=2, e=0)
    with pytest.raises(KeyboardInterrupt, match=r"^d$"):  # the first error
        undo.unwind()
    assert done == ["e", "c", "a"]
    undo.unwind()
    assert done == ["e", "c", "a", "d", "b"]
    assert undo.steps == []


def test_a_list_keeps_nothing_alive_and_leaves_out_what_is_gone() -> None:
    """The step of the object that is left runs; that of the one that was let go does not."""
    done: list[str] = []
    undo, kept, gone = Undo(), _Fails("kept", 0, done), _Fails("gone", 0, done)
    dead = weakref.ref(gone)
    undo.weakly(_Fails.__call__, kept)
    undo.weakly(lambda *each: done.append("both"), kept, gone)
    undo.weakly(_Fails.__call__, gone)
    del gone
    assert dead() is None
    undo.unwind()
    assert done == ["kept"]
    assert undo.steps == []
