"""The registry: who may register, who is chosen, and what becomes of a backend that breaks.

Covers: xamp.registry.registry, xamp.registry.probe, xamp.contract.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from forked_python import python
from site_packages import distribution

import xamp
from xamp.backends.native import NativeBackend
from xamp.contract import CONTRACT, Backend, BackendSpec, Capabilities, Cause
from xamp.errors import BackendUnavailable, PolicyError, StateError
from xamp.registry.plugins import PluginSpec
from xamp.registry.probe import Failed
from xamp.registry.registry import BUILT_INS, REGISTRY, Registry

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "xamp_test_plugin"


class Working(Backend):
    pass


class Counted(Backend):
    probes = 0

    def probe(self) -> None:
        type(self).probes += 1


class CountedFailure(Backend):
    probes = 0

    def probe(self) -> NoReturn:
        type(self).probes += 1
        raise BackendUnavailable("no card in the slot\nput one in\nand restart")


class Exits(Backend):
    def probe(self) -> NoReturn:
        sys.exit(3)


class Interrupted(Backend):
    def probe(self) -> NoReturn:
        raise KeyboardInterrupt


class Nested(Backend):
    def probe(self) -> None:
        try:
            raise OSError("libfoo.so: cannot open\n  shared object file")
        except OSError as error:
            raise RuntimeError("extension failed") from error


class LyingCapabilities(Backend):
    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return {"levels": "all"}  # type: ignore[return-value]


class BrokenVersions(Backend):
    def versions(self) -> NoReturn:
        raise LookupError("driver query failed")


NOT_A_BACKEND = object


@pytest.fixture(autouse=True)
def plugin_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file's classes under an importable name, and no XAMP_BACKEND from outside."""
    module = types.ModuleType(PLUGIN)
    vars(module).update({name: value for name, value in globals().items() if not name.startswith("_")})
    monkeypatch.setitem(sys.modules, PLUGIN, module)
    monkeypatch.delenv("XAMP_BACKEND", raising=False)
    Counted.probes = CountedFailure.probes = 0


def spec(name: str, target: str = "Working", *device_types: str, priority: int = 0, hint: str = "") -> BackendSpec:
    return BackendSpec(name, device_types or ("cpu",), f"{PLUGIN}:{target}", priority=priority, install_hint=hint)


def registry(*specs: BackendSpec) -> Registry:
    return Registry(specs, group=None)


# --- registering


@pytest.mark.parametrize("name", ["", "auto", "AUTO", "1st", "two words", "a:b", None, 3])
def test_a_name_must_be_a_word_and_not_auto(name: object) -> None:
    with pytest.raises(PolicyError, match=r"register_backend\(.*name=.* must be letters, digits"):
        registry().register(BackendSpec(name, ("cpu",), "a:B"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device_types", [(), "cpu", ["cpu"], ("",), ("cuda:0",), (1,), None])
def test_device_types_must_be_a_tuple_of_types(device_types: object) -> None:
    with pytest.raises(PolicyError, match=r"device_types=.* must be a non-empty tuple"):
        registry().register(BackendSpec("x", device_types, "a:B"))  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["", "module", "module:", ":Class", "a.:B", "a:B:C", "a b:C", "a/b:C", None])
def test_a_target_names_a_module_and_a_class(target: object) -> None:
    with pytest.raises(PolicyError, match=r'target=.* must have the form "package.module:Class"'):
        registry().register(BackendSpec("x", ("cpu",), target))  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", ["high", True, 1.0, None])
def test_a_priority_is_an_int(priority: object) -> None:
    with pytest.raises(PolicyError, match=f"priority={priority!r} must be an int"):
        registry().register(BackendSpec("x", ("cpu",), "a:B", priority=priority))  # type: ignore[arg-type]


@pytest.mark.parametrize("masks", ["CUDA_VISIBLE_DEVICES", ["A"], (1,), None])
def test_masks_are_a_tuple_of_names(masks: object) -> None:
    with pytest.raises(PolicyError, match=r"masks=.* must be a tuple of names of environment variables"):
        registry().register(BackendSpec("x", ("cpu",), "a:B", masks=masks))  # type: ignore[arg-type]


@pytest.mark.parametrize("causes", ["module", "a:B:C", None, ()])
def test_causes_name_a_module_and_a_table(causes: object) -> None:
    with pytest.raises(PolicyError, match=r'causes=.* must have the form "package.module:NAME"'):
        registry().register(BackendSpec("x", ("cpu",), "a:B", causes=causes))  # type: ignore[arg-type]


def test_only_a_spec_can_be_registered() -> None:
    with pytest.raises(PolicyError, match=r"must be an xamp\.contract\.BackendSpec, not dict"):
        registry().register({"name": "x"})  # type: ignore[arg-type]


def test_a_taken_name_is_refused_and_both_registrants_are_named() -> None:
    known = registry(spec("one"))
    known.register(spec("two"), source="the second")
    with pytest.raises(
        PolicyError, match=r"'two' is already taken by the second, and the third wants it too.*one, two"
    ):
        known.register(spec("two", "Counted"), source="the third")
    assert type(known.resolve("two", "cpu")) is Working


def test_override_replaces_a_backend_that_is_in_use() -> None:
    known = registry(spec("one"))
    assert type(known.resolve("one", "cpu")) is Working
    known.register(spec("one", "Counted"), override=True, source="a test")
    assert type(known.resolve("one", "cpu")) is Counted
    assert [row.source for row in known.reports()] == ["a test"]


def test_override_with_an_equal_spec_probes_again() -> None:
    known = registry(spec("one", "Counted"))
    known.resolve("one", "cpu")
    known.register(spec("one", "Counted"), override=True)
    known.resolve("one", "cpu")
    assert Counted.probes == 2


def test_the_public_call_names_the_line_that_registered() -> None:
    with pytest.raises(
        PolicyError, match=r"'cpu' is already taken by xamp, and register_backend at .*test_registry.py"
    ):
        xamp.register_backend(spec("cpu"))


def test_the_public_call_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xamp.registry.registry.REGISTRY", registry())
    xamp.register_backend(spec("mine"))
    (row,) = xamp.available_backends()
    assert (row.name, row.usable) == ("mine", True)
    assert "test_registry.py" in row.source


# --- loading


def test_a_backend_is_probed_once_and_is_one_object() -> None:
    known, mine = registry(spec("one", "Counted")), spec("one", "Counted")
    assert known.resolve("one", "cpu") is known.resolve("one", "cpu") is known.resolve("auto", "cpu")
    known.reports()
    assert Counted.probes == 1
    assert known.resolve("one", "cpu").spec == mine


def test_a_failure_is_kept_with_reason_and_hint() -> None:
    known = registry(spec("one", "CountedFailure", hint="not this"))
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match=r"cannot be used: no card in the slot\nput one in") as caught:
            known.resolve("one", "cpu")
        assert isinstance(caught.value.__cause__, BackendUnavailable)
    (row,) = known.reports()
    assert (row.usable, row.reason, row.hint) == (False, "no card in the slot", "put one in\nand restart")
    assert CountedFailure.probes == 1


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("Exits", "SystemExit: 3"),
        ("Nested", "RuntimeError: extension failed (caused by OSError: libfoo.so: cannot open shared object file)"),
        ("LyingCapabilities", "TypeError: capabilities() of LyingCapabilities returned {'levels': 'all'}"),
        ("BrokenVersions", "LookupError: driver query failed"),
        ("Missing", f"AttributeError: module '{PLUGIN}' has no attribute 'Missing'"),
        ("NOT_A_BACKEND", f"its target '{PLUGIN}:NOT_A_BACKEND' is <class 'object'>, not a subclass of"),
        ("registry", "its target"),
    ],
)
def test_whatever_a_backend_raises_is_contained(target: str, reason: str) -> None:
    known = registry(spec("bad", target, priority=9, hint="the cure"), spec("good"))
    bad, good = known.reports()
    assert bad.reason.startswith(reason)
    assert "\n" not in bad.reason
    assert bad.hint
    assert (bad.usable, good.usable) == (False, True)
    assert known.resolve("auto", "cpu").name == "good"


def test_a_module_that_cannot_be_imported_is_contained() -> None:
    known = registry(BackendSpec("gone", ("cpu",), "xamp_no_such_module:Backend", install_hint="pip install gone"))
    with pytest.raises(BackendUnavailable, match=r"No module named 'xamp_no_such_module'\npip install gone") as caught:
        known.resolve("gone", "cpu")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_ctrl_c_gets_through_and_is_not_kept() -> None:
    known = registry(spec("one", "Interrupted"))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            known.reports()


# --- resolving


def test_auto_takes_the_highest_priority_that_serves_the_type_and_works(caplog: pytest.LogCaptureFixture) -> None:
    known = registry(
        spec("low", priority=1),
        spec("high", priority=5),
        spec("broken", "CountedFailure", priority=7),
        spec("other", "Working", "cuda", priority=9),
    )
    with caplog.at_level("INFO", logger="xamp"):
        assert known.resolve("auto", "cpu").name == "high"
    assert "broken passed over for high: no card in the slot" in caplog.text


def test_equal_priorities_go_by_name() -> None:
    assert registry(spec("b"), spec("a")).resolve("auto", "cpu").name == "a"


def test_the_environment_chooses_for_auto_but_not_over_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry(spec("low"), spec("high", priority=5))
    monkeypatch.setenv("XAMP_BACKEND", " low ")
    assert known.resolve("auto", "cpu").name == "low"
    assert known.resolve("high", "cpu").name == "high"
    for nothing in ("", "auto"):
        monkeypatch.setenv("XAMP_BACKEND", nothing)
        assert known.resolve("auto", "cpu").name == "high"


def test_an_unknown_name_lists_the_names_and_the_likely_one() -> None:
    with pytest.raises(
        BackendUnavailable, match=r"backend='cuad': no backend of that name.*Did you mean 'cuda'\?.*cpu, cuda"
    ):
        registry(spec("cpu"), spec("cuda")).resolve("cuad", "cpu")


def test_no_guess_is_made_where_nothing_is_close() -> None:
    with pytest.raises(BackendUnavailable, match=r"is registered\. Registered are cpu\."):
        registry(spec("cpu")).resolve("tenstorrent", "cpu")


def test_a_backend_that_does_not_serve_the_device_says_which_it_serves() -> None:
    known = registry(spec("cpu"), spec("gpu", "Working", "cuda", "xpu"))
    with pytest.raises(
        BackendUnavailable, match=r"backend='gpu'.*serves cuda, xpu, not 'cpu'.*never moves a model"
    ) as e:
        known.resolve("gpu", "cpu")
    assert "choose one that serves 'cpu' (cpu)" in str(e.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nope", "no backend of that name"), ("gpu", "serves cuda, not 'cpu'"), ("bad", "cannot be used: no card")],
)
def test_errors_say_that_the_name_came_from_the_environment(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = registry(spec("cpu"), spec("gpu", "Working", "cuda"), spec("bad", "CountedFailure"))
    monkeypatch.setenv("XAMP_BACKEND", name)
    with pytest.raises(BackendUnavailable, match=rf"^XAMP_BACKEND='{name}' \(environment variable\): .*{message}"):
        known.resolve("auto", "cpu")
    with pytest.raises(BackendUnavailable, match=rf"^backend='{name}': .*{message}"):
        known.resolve(name, "cpu")


def test_a_type_that_nobody_serves_says_how_to_register() -> None:
    with pytest.raises(BackendUnavailable, match=r"device type 'npu'\. Registered are cpu \(cpu\).*register_backend\("):
        registry(spec("cpu")).resolve("auto", "npu")


def test_a_type_that_only_broken_backends_serve_gives_every_reason() -> None:
    known = registry(spec("one", "CountedFailure", priority=2), spec("two", "BrokenVersions", hint="reinstall it"))
    with pytest.raises(BackendUnavailable) as caught:
        known.resolve("auto", "cpu")
    assert str(caught.value).splitlines() == [
        "no backend for device type 'cpu' can be used:",
        "one: no card in the slot",
        "put one in",
        "and restart",
        "two: LookupError: driver query failed",
        "reinstall it",
    ]


# --- reports


def test_reports_are_ordered_and_carry_what_the_backend_says() -> None:
    known = registry(spec("b"), spec("a"), spec("c", "Working", "cuda", priority=3))
    rows = known.reports()
    assert [row.name for row in rows] == ["c", "a", "b"]
    assert rows[1].devices == ("cpu",)
    assert rows[1].versions == {"torch": torch.__version__}
    assert rows[1].capabilities == Capabilities()
    assert (rows[0].device_types, rows[0].priority, rows[0].source, rows[0].tested) == (("cuda",), 3, "xamp", True)


def test_the_built_ins_are_registered_under_their_own_device_types() -> None:
    rows = {row.name: row for row in xamp.available_backends() if row.source == "xamp"}
    assert list(rows) == ["cuda", "npu", "xpu", "mps", "cpu"]
    assert all(row.device_types == (name,) for name, row in rows.items())
    assert [name for name, row in rows.items() if row.tested] == ["cuda", "npu", "cpu"]
    assert all(row.usable or (row.reason and row.hint) for row in rows.values())
    assert REGISTRY.resolve("auto", "cpu").name == "cpu"
    assert {one.name for one in BUILT_INS} == set(rows)


# --- entry points, as installed distributions have them


GOOD = """
from xamp.contract import Backend, BackendSpec
SPEC = BackendSpec("acme", ("cpu",), "acme_plugin:AcmeBackend", priority=-1)
LATE = BackendSpec("late", ("cpu",), "acme_plugin:SPEC")
CLASH = BackendSpec("cuda", ("cuda",), "acme_plugin:AcmeBackend", priority=500)
class AcmeBackend(Backend):
    def devices(self):
        return ("Acme 1",)
"""
LISTING = """
import dataclasses, json, sys
import xamp
from xamp.registry.registry import REGISTRY
assert "acme_plugin" not in sys.modules, "entry points are read on first use, not before"
def attempt(name, kind="cpu"):
    try:
        return REGISTRY.resolve(name, kind).name
    except xamp.BackendUnavailable as error:
        return str(error)
tried = {name: attempt(name) for name in ("auto", "acme", "crash", "quits", "late", "notspec", "badspec")}
tried["cuda"] = {spec.name: spec.target for spec in REGISTRY.specs()}["cuda"]
tried["hpu"] = attempt("auto", "hpu")
rows = [{**dataclasses.asdict(row), "versions": {}} for row in xamp.available_backends()]
try:
    xamp.register_backend(xamp.contract.BackendSpec("acme", ("cpu",), "a:B"))
except xamp.PolicyError as error:
    tried["register"] = str(error)
print(json.dumps([rows, tried]))
"""


def in_new_process(code: str, folder: Path, **variables: str) -> str:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [python(), "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def with_plugins(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], dict[str, str]]:
    folder = tmp_path_factory.mktemp("site")
    distribution(
        folder,
        "acme-accel",
        "acme = acme_plugin:SPEC\nlate = acme_plugin:LATE\ncuda = acme_plugin:CLASH\nnotspec = acme_plugin:AcmeBackend",
        acme_plugin=GOOD,
    )
    distribution(folder, "zz-copycat", "acme = acme_plugin:SPEC")
    distribution(
        folder,
        "crashing",
        "crash = crash_plugin:SPEC\nquits = quit_plugin:SPEC\nbadspec = bad_plugin:SPEC",
        crash_plugin="raise OSError('libacme.so: not found')",
        quit_plugin="raise SystemExit('licence expired')",
        bad_plugin="from xamp.contract import BackendSpec\nSPEC = BackendSpec('auto', ('cpu',), 'a:B')",
    )
    rows, tried = json.loads(in_new_process(LISTING, folder))
    return rows, tried


Plugins = tuple[list[dict[str, object]], dict[str, str]]


def row_of(plugins: Plugins, name: str, source: str) -> dict[str, object]:
    (row,) = [row for row in plugins[0] if row["name"] == name and row["source"] == source]
    return row


def test_a_good_entry_point_is_a_backend(with_plugins: Plugins) -> None:
    row = row_of(with_plugins, "acme", "acme-accel 1.5")
    assert (row["usable"], row["devices"], row["priority"]) == (True, ["Acme 1"], -1)
    assert with_plugins[1]["acme"] == "acme"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "its entry point 'crash_plugin:SPEC' failed: OSError: libacme.so: not found"),
        ("quits", "its entry point 'quit_plugin:SPEC' failed: SystemExit: licence expired"),
        (
            "badspec",
            "its entry point 'bad_plugin:SPEC' failed: PolicyError: entry point badspec = bad_plugin:SPEC: name",
        ),
    ],
)
def test_a_broken_entry_point_is_reported_and_explains_itself_when_asked_for(
    with_plugins: Plugins, name: str, reason: str
) -> None:
    row = row_of(with_plugins, name, "crashing 1.5")
    assert row["usable"] is False
    assert str(row["reason"]).startswith(reason)
    assert row["hint"] == "repair or uninstall crashing 1.5"
    assert with_plugins[1][name].startswith(f"backend={name!r}: this backend cannot be used: {reason}")


def test_an_entry_point_that_is_no_spec_is_reported(with_plugins: Plugins) -> None:
    row = row_of(with_plugins, "notspec", "acme-accel 1.5")
    assert "must be an xamp.contract.BackendSpec, not type" in str(row["reason"])


def test_an_entry_point_whose_target_is_no_backend_is_unusable(with_plugins: Plugins) -> None:
    row = row_of(with_plugins, "late", "acme-accel 1.5")
    assert row["usable"] is False
    assert "not a subclass of xamp.contract.Backend" in str(row["reason"])
    assert "not a subclass of xamp.contract.Backend" in with_plugins[1]["late"]


def test_an_entry_point_never_takes_a_built_in_name(with_plugins: Plugins) -> None:
    row = row_of(with_plugins, "cuda", "acme-accel 1.5")
    assert (row["usable"], row["reason"]) == (False, "the name 'cuda' is already taken by xamp")
    assert with_plugins[1]["cuda"] == "xamp.backends.cuda:CudaBackend"


def test_of_two_entry_points_with_one_name_the_first_stays(with_plugins: Plugins) -> None:
    row = row_of(with_plugins, "acme", "zz-copycat 1.5")
    assert (row["usable"], row["reason"]) == (False, "the name 'acme' is already taken by acme-accel 1.5")


def test_broken_entry_points_harm_no_one_else(with_plugins: Plugins) -> None:
    rows, tried = with_plugins
    assert tried["auto"] == "cpu"
    assert [row["usable"] for row in rows if row["name"] == "cpu"] == [True]
    priorities = [(-int(str(row["priority"])), str(row["name"])) for row in rows]
    assert priorities == sorted(priorities)


def test_where_no_backend_serves_a_type_the_broken_entry_points_are_named(with_plugins: Plugins) -> None:
    assert "not readable: crash from crashing 1.5" in with_plugins[1]["hpu"]


def test_registering_a_name_that_an_entry_point_has_is_refused(with_plugins: Plugins) -> None:
    assert "'acme' is already taken by acme-accel 1.5, and register_backend at" in with_plugins[1]["register"]


def test_a_damaged_distribution_is_reported_and_harms_no_one(tmp_path: Path) -> None:
    distribution(tmp_path, "damaged", "x = y:z")
    (tmp_path / "damaged-1.5.dist-info" / "entry_points.txt").write_bytes(b"[other]\n\xff\xfe = a:b\n")
    code = "import xamp, json; print(json.dumps([[r.name, r.usable, r.reason] for r in xamp.available_backends()]))"
    # torch reads entry points too, unless told not to, and does not survive this
    printed = in_new_process(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    rows = {name: (usable, reason) for name, usable, reason in json.loads(printed)}
    assert rows["cpu"] == (True, "")
    assert rows["xamp.backends"][0] is False
    assert rows["xamp.backends"][1].startswith("entry points cannot be listed: UnicodeDecodeError")


# ---------------------------------------------------------------- the contract's version, reserved names


@pytest.mark.parametrize(
    ("version", "fix"), [(CONTRACT + 1, "Update xamp"), (0, "Update the package that ships"), ("1", "Update")]
)
def test_a_spec_for_another_contract_is_refused(version: Any, fix: str) -> None:
    spec = BackendSpec("acme", ("cpu",), "acme:Backend", contract=version)
    with pytest.raises(PolicyError, match=rf"written for version {version!r} of the contract .* has version 1\. {fix}"):
        registry().register(spec)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("contract=7", "written for version 7 of the contract"),
        ("borrows=True", "written for another version of the contr"),
    ],
)
def test_a_plugin_for_another_contract_is_listed_with_the_reason(
    field: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"from xamp.contract import BackendSpec\nSPEC = BackendSpec('acme', ('cpu',), 'acme:Backend', {field})\n"
    distribution(tmp_path, "acme-xamp", "acme = acme_contract_plugin:SPEC", acme_contract_plugin=text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = [row for row in Registry((), "xamp.backends").reports() if row.name == "acme"]
    sys.modules.pop("acme_contract_plugin", None)
    assert not row.usable
    assert says in row.reason
    assert row.hint.startswith("repair or uninstall acme-xamp 1.5")


@pytest.mark.parametrize("name", ["apex", "APEX", "auto"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=f'name={name!r} must be letters, .* and not be "auto" or "apex"'):
        registry().register(BackendSpec(name, ("cpu",), "acme:Backend"))


# ---------------------------------------------------------------- devices in use, and captures


class OutOfMemory(Backend):
    """Has no room at its first probe, as a GPU that another process has filled."""

    left = 0
    says = "CUDA out of memory. Tried to allocate 20.00 MiB."

    def probe(self) -> None:
        if OutOfMemory.left:
            OutOfMemory.left -= 1
            raise torch.OutOfMemoryError(self.says)


class OutOfMemoryByName(OutOfMemory):
    """The same, of a device whose text does not say it."""

    says = "no block of 20.00 MiB is left"


class NoRoomInTrial(NativeBackend):
    """The same, where the product of the trial is what finds no room."""

    def _defect(self, device: torch.device, dtype: str) -> str:
        if OutOfMemory.left:
            OutOfMemory.left -= 1
            with mock.patch.object(torch, "ones", side_effect=RuntimeError("out of memory")):
                return super()._defect(device, dtype)
        return super()._defect(device, dtype)


def served(cls: type[Backend], monkeypatch: pytest.MonkeyPatch, **more: Any) -> BackendSpec:
    """The spec of a backend of a module of its own, which has ``more``."""
    module = types.ModuleType("xamp_test_full")
    vars(module).update(Full=cls, **more)
    monkeypatch.setitem(sys.modules, "xamp_test_full", module)
    causes = "xamp_test_full:CAUSES" if more else ""
    return BackendSpec("full", ("cpu",), "xamp_test_full:Full", install_hint="update the driver", causes=causes)


@pytest.mark.parametrize("cls", [OutOfMemory, OutOfMemoryByName, NoRoomInTrial])
def test_a_full_device_stays_out_for_the_process_unless_it_is_registered_again(
    cls: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutOfMemory, "left", 1)
    full = served(cls, monkeypatch)
    found = registry(full)
    for _ in range(2):
        with pytest.raises(
            BackendUnavailable, match=r"out of memory or busy: (?s:.*)\nfree .*; then start a new process"
        ) as raised:
            found.resolve("full", "cpu")
        assert "update the driver" not in str(raised.value)
        assert [row.usable for row in found.reports()] == [False]
    assert OutOfMemory.left == 0
    found.register(full, override=True)
    assert found.best_for("cpu").name == "full"


def test_a_table_of_causes_may_know_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutOfMemory, "left", 1)
    table = (Cause("out of memory", "the card is full", "ask who fills it"),)
    found = registry(served(OutOfMemory, monkeypatch, CAUSES=table))
    with pytest.raises(BackendUnavailable, match="the card is full\nask who fills it"):
        found.resolve("full", "cpu")
    (outcome,) = map(found.outcome, found.specs())
    assert isinstance(outcome, Failed)
    assert outcome.is_there


def test_a_probe_in_a_capture_raises_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(served(NativeBackend, monkeypatch))
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
        for ask in (found.reports, lambda: found.resolve("full", "cpu")):
            with pytest.raises(StateError, match=r"being captured on cpu.*Run at least one whole training step before"):
                ask()
    assert found.resolve("full", "cpu").name == "full"


def test_an_entry_point_with_the_name_of_a_built_in_is_reported_and_left_out() -> None:
    found = registry(*BUILT_INS)
    found.add_entries([PluginSpec(BackendSpec("cpu", ("cpu",), "somebody.else:Theirs", priority=99), "theirs 1.0")])
    assert type(found.resolve("cpu", "cpu")).__module__ == "xamp.backends.cpu"
    (row,) = (row for row in found.reports() if row.source == "theirs 1.0")
    assert not row.usable
    assert row.reason.startswith("the name 'cpu' is already taken by")


def test_a_spelling_stands_for_one_backend() -> None:
    found = registry(*BUILT_INS)
    spelt = found.resolve("apex", "cpu")
    assert spelt is found.resolve("apex", "cpu")
    assert spelt is not found.resolve("cpu", "cpu")
    assert (spelt.name, found.resolve("cpu", "cpu").name) == ("apex", "cpu")
