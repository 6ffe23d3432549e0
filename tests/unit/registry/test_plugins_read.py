"""Which plugins are read (XAMP_PLUGINS), and what one that breaks does to the others.

Covers: xamp.registry.plugins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from site_packages import INSTALLED, distribution, doctor_finds, row_of

from xamp.contract import BackendReport, BackendSpec
from xamp.errors import BackendUnavailable, PolicyError
from xamp.registry.plugins import check_spec
from xamp.registry.registry import BUILT_INS, HOST, Registry

GROUP = "xamp.backends"
HEAD = "from xamp.contract import Backend, BackendSpec\n"
GOOD = (
    HEAD
    + "SPEC = BackendSpec('good', ('cpu',), 'q_good:Good', priority=7)\nclass Good(Backend):\n    def devices(self):\n"
    "        return ['Good 1']\n"
)


def spec(**fields: str) -> str:
    given = {"name": "'{name}'", "device_types": "('cpu',)", "target": "'q_{name}:None'", **fields}
    return HEAD + "SPEC = BackendSpec(" + ", ".join(f"{key}={value}" for key, value in given.items()) + ")"


HOSTILE = "type('H', (), {'__repr__': lambda self: 1 / 0, '__eq__': lambda self, o: 1 / 0, '__hash__': None})()"
ENDING = {
    "leaves": "import os; os._exit(9)",
    "hangs": "import time\nwhile True:\n    time.sleep(1)",
}
BROKEN = {
    "raises": "raise OSError('libacme.so: not found')",
    "quits": "import sys; sys.exit(3)",
    "nospec": "",
    "number": "SPEC = 7",
    "syntax": "def",
    "nomodule": "import q_there_is_no_such_module",
    "recursion": "def f():\n    f()\nf()",
    "memory": "raise MemoryError",
    "hint": spec(install_hint="[1]"),
    "tested": spec(tested="[]"),
    "priority": spec(priority="'high'"),
    "masks": spec(masks="['A']"),
    "causes": spec(causes="7"),
    "ledger": spec(ledger="{}"),
    "emulations": spec(emulations="((1, 2),)"),
    "types": spec(device_types="(7,)"),
    "names": spec(name="b'x'"),
    "contract": spec(contract=HOSTILE),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a healthy plugin and 20 broken ones."""
    for name, module in {**BROKEN, **ENDING, "good": GOOD}.items():
        module = module.replace("{name}", name)
        distribution(tmp_path, f"dist-{name}", f"{name} = q_{name}:SPEC", **{f"q_{name}": module})
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("q_")]:
        del sys.modules[name]


def registry() -> Registry:
    return Registry([spec for spec in BUILT_INS if spec.name == HOST], GROUP)


def by_name(made: Registry) -> dict[str, BackendReport]:
    return {row.name: row for row in made.reports()}


def test_a_healthy_plugin_works_beside_all_that_break(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_PLUGINS", ",".join([*BROKEN, " good "]))
    rows = by_name(made := registry())
    assert (rows["good"].usable, rows["good"].devices) == (True, ("Good 1",))
    assert rows[HOST].usable
    for name in BROKEN:
        assert not rows[name].usable
        assert rows[name].reason.startswith(f"its entry point 'q_{name}:SPEC' failed: "), rows[name]
        assert rows[name].hint.startswith(f"repair or uninstall dist-{name} 1.5")
    for name in ENDING:
        assert "leaves it out, so it was not read" in rows[name].reason
    assert made.best_for("cpu").name == "good"
    assert made.resolve(HOST, "cpu").name == HOST


def test_none_reads_none(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_PLUGINS", "none")
    rows = by_name(made := registry())
    assert [spec.name for spec in made.specs()] == [HOST]
    assert {*rows} - INSTALLED == {*BROKEN, *ENDING, "good", HOST}
    assert rows["good"].reason == "XAMP_PLUGINS='none' leaves it out, so it was not read"
    assert rows["good"].hint == "unset XAMP_PLUGINS, or add the name 'good' to it"
    assert not [name for name in sys.modules if name.startswith("q_")]
    with pytest.raises(BackendUnavailable, match="XAMP_PLUGINS='none' leaves it out"):
        made.resolve("good", "cpu")


def test_a_name_that_nothing_has_is_reported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_PLUGINS", "good,goood")
    rows = by_name(registry())
    assert rows["good"].usable
    assert rows["goood"].reason.startswith("XAMP_PLUGINS='good,goood' names it, and nothing that is installed has")
    assert ", good, " in rows["goood"].hint


def test_the_doctor_reads_no_more_and_names_those_left_out(site: Path) -> None:
    found = doctor_finds(folder=site, code=0, XAMP_PLUGINS="none")
    for name in (*BROKEN, *ENDING, "good"):
        row = row_of(found, name, f"dist-{name} 1.5")
        assert (row["usable"], row["broken"]) == (False, False)
        assert row["reason"] == "XAMP_PLUGINS='none' leaves it out, so it was not read"
    assert row_of(found, HOST)["usable"]
    assert found["environment"]["XAMP_PLUGINS"] == "none"


INTERRUPTING = "import q_times\nq_times.n += 1\nif q_times.n == 1:\n    raise KeyboardInterrupt\n"


def test_ctrl_c_while_plugins_are_read_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "dist-a", "first = q_good:SPEC", q_good=GOOD, q_times="n = 0")
    module = INTERRUPTING + GOOD.replace("'good'", "'later'").replace("q_good", "q_later")
    distribution(tmp_path, "dist-b", "later = q_later:SPEC", q_later=module)
    monkeypatch.syspath_prepend(tmp_path)
    made = registry()
    try:
        with pytest.raises(KeyboardInterrupt):
            made.specs()
        assert {spec.name for spec in made.specs()} - INSTALLED == {HOST, "good", "later"}
        rows = [row for row in made.reports() if row.name not in INSTALLED]
        assert len(rows) == 3
        assert all(row.usable for row in rows)
    finally:
        for name in [name for name in sys.modules if name.startswith("q_")]:
            del sys.modules[name]


class Hostile:
    def __repr__(self) -> str:
        raise OSError("no repr")

    def __eq__(self, other: object) -> bool:
        raise OSError("no eq")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [[1], None, 7, b"x", Hostile(), object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("field", [field for field in BackendSpec.__dataclass_fields__ if field != "priority"])
def test_each_badly_typed_field_is_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {"name": "mine", "device_types": ("cpu",), "target": "mine:Mine", field: value}
    with pytest.raises(PolicyError, match=r"^call: "):
        check_spec(BackendSpec(**fields), "call")
    with pytest.raises(PolicyError, match=r"^register_backend\("):
        registry().register(BackendSpec(**fields))
