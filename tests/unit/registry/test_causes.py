"""The tables of causes: what a row matches, who is asked, and that every place says the same.

Covers: xamp.registry.causes, xamp.registry.find_torch, xamp.registry.probe, backends.cuda_causes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from site_packages import distribution, doctor_finds, plain_environment, row_of
from torch_versions import MINIMUM, OLDER

from xamp.contract import Backend, BackendSpec, Cause, Failure
from xamp.errors import BackendUnavailable
from xamp.registry import causes, find_torch, registry
from xamp.registry.causes import TorchFailure, explain, explain_torch, full_text, one_line, table_of
from xamp.registry.registry import BUILT_INS, Registry

TABLES = "xamp_test_tables"
NO_CARD = Cause(r"slot (\d+) is empty", r"there is no card in slot \1", r"put one into slot \1", masked=True)


class WithoutCard(Backend):
    def probe(self) -> NoReturn:
        try:
            raise OSError("slot 7 is empty")
        except OSError as error:
            raise RuntimeError("driver call failed") from error


class Explaining(Backend):
    def probe(self) -> NoReturn:
        raise BackendUnavailable("slot 8 is empty, says the backend\nask the backend")


class Unforeseen(Backend):
    def probe(self) -> NoReturn:
        raise BackendUnavailable("something else\ndo something")


def of_timeouts(failure: Failure) -> tuple[str, str] | None:
    return ("the card hangs", "pull it out") if failure.kind == "timeout" else None


def breaks(failure: Failure) -> NoReturn:
    raise SystemExit("the table is broken")


ROWS = (NO_CARD, of_timeouts, Cause("slot", "something about a slot", "look"))
ONE = of_timeouts
BROKEN = (breaks,)
NO_TABLE = {"slot": "empty"}


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This file's names under an importable name."""
    module = types.ModuleType(TABLES)
    vars(module).update({name: value for name, value in globals().items() if not name.startswith("_")})
    monkeypatch.setitem(sys.modules, TABLES, module)
    return iter(())


def spec(causes: str = "ROWS", target: str = "WithoutCard", *masks: str) -> BackendSpec:
    return BackendSpec("acme", ("cpu",), f"{TABLES}:{target}", masks=masks, causes=causes and f"{TABLES}:{causes}")


def failure(text: str = "", kind: str = "exception", during: str = "probe", **environment: str) -> Failure:
    return Failure(kind, text, during, environment)


# --- rows


def test_a_row_fills_the_groups_of_its_pattern_in() -> None:
    assert NO_CARD(failure("RuntimeError: x\nOSError: slot 7 is empty")) == (
        "there is no card in slot 7",
        "put one into slot 7",
    )
    assert NO_CARD(failure("slot seven is empty")) is None


def test_a_row_applies_to_its_kinds_and_times_only() -> None:
    row = Cause("", "cause", "cure", kinds=("crash", "timeout"), during=("probe",))
    assert row(failure("any", "crash")) == row(failure("", "timeout")) == ("cause", "cure")
    assert row(failure("any", "exception")) is None
    assert row(failure("any", "crash", "torch")) is None


def test_a_mask_that_is_set_is_the_likelier_cause_of_no_device() -> None:
    masked = spec("ROWS", "WithoutCard", "ACME_VISIBLE_DEVICES", "ACME_MASK")
    known = explain(masked, failure("slot 7 is empty", ACME_VISIBLE_DEVICES="", ACME_MASK="3"))
    assert known == (
        "no device is visible under ACME_VISIBLE_DEVICES='' ACME_MASK='3'",
        "unset ACME_VISIBLE_DEVICES, or name devices in it",
    )
    assert explain(masked, failure("slot 7 is empty", OTHER_MASK="3")) == (
        "there is no card in slot 7",
        "put one into slot 7",
    )
    unmasked = explain(masked, failure("slot x", ACME_MASK="3"))
    assert unmasked == ("something about a slot", "look")


def test_the_first_row_that_knows_is_taken() -> None:
    assert explain(spec(), failure("slot 7 is empty")) == ("there is no card in slot 7", "put one into slot 7")
    assert explain(spec(), failure("slot", "timeout")) == ("the card hangs", "pull it out")
    assert explain(spec(), failure("fan")) is None


def test_a_table_may_be_one_function_or_missing() -> None:
    assert explain(spec("ONE"), failure("", "timeout")) == ("the card hangs", "pull it out")
    assert table_of(spec("")) == ()
    assert explain(spec(""), failure("slot 7 is empty")) is None


@pytest.mark.parametrize("causes", ["BROKEN", "NO_TABLE", "MISSING"])
def test_a_broken_table_knows_nothing_and_harms_nothing(causes: str) -> None:
    assert explain(spec(causes), failure("slot 7 is empty")) is None


def test_what_is_no_table_is_named() -> None:
    with pytest.raises(TypeError, match=r"NO_TABLE is \{'slot': 'empty'\}, neither a function nor a sequence of"):
        table_of(spec("NO_TABLE"))


def test_the_built_ins_tables_can_be_read_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom xamp.registry.registry import BUILT_INS\n"
        "from xamp.registry.causes import table_of\nprint(sum(len(table_of(spec)) for spec in BUILT_INS))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain_environment(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) >= 10


# --- the texts that are searched


def chained() -> Exception:
    try:
        try:
            raise OSError("libacme.so: cannot open\n  shared object file")
        except OSError as error:
            raise RuntimeError("extension failed") from error
    except RuntimeError as error:
        return error


def test_the_whole_chain_is_searched_and_one_line_shows_both_ends() -> None:
    assert (
        full_text(chained()) == "RuntimeError: extension failed\nOSError: libacme.so: cannot open\n  shared object file"
    )
    assert one_line(chained()) == (
        "RuntimeError: extension failed (caused by OSError: libacme.so: cannot open shared object file)"
    )


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert full_text(one).count("two") == 10
    assert one_line(one).startswith("ValueError: one (caused by ValueError: ")


# --- the probe


def test_a_probe_s_error_is_told_in_the_words_of_the_table_everywhere() -> None:
    registry = Registry([spec()], group=None)
    (row,) = registry.reports()
    assert (row.reason, row.hint) == ("there is no card in slot 7", "put one into slot 7")
    assert row.detail == "RuntimeError: driver call failed (caused by OSError: slot 7 is empty)"
    with pytest.raises(
        BackendUnavailable, match=r"^backend='acme': .*: there is no card in slot 7\nput one into slot 7$"
    ) as caught:
        registry.resolve("acme", "cpu")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_table_goes_before_the_backend_s_own_words_which_stand_where_it_knows_nothing() -> None:
    (known,) = Registry([spec(target="Explaining")], group=None).reports()
    assert known.reason == "there is no card in slot 8"
    (unknown,) = Registry([spec(target="Unforeseen")], group=None).reports()
    assert (unknown.reason, unknown.hint, unknown.detail) == ("something else", "do something", "")


def test_a_device_type_that_torch_does_not_know_says_what_to_install() -> None:
    missing = BackendSpec("acme", ("acme",), "xamp.contract:Backend", install_hint="pip install torch-acme")
    (row,) = Registry([missing], group=None).reports()
    assert row.reason.endswith(" knows no device type 'acme'")
    assert row.hint == "pip install torch-acme"


# --- torch itself


def broken_torch(text: str) -> TorchFailure:
    return TorchFailure(f"torch cannot be imported: {text}", "repair it", RuntimeError(text), text=text)


def test_a_backend_s_table_explains_why_torch_cannot_be_imported() -> None:
    found = explain_torch(broken_torch("slot 7 is empty"), [spec("ONE"), spec()])
    assert found.reason == "torch cannot be imported: there is no card in slot 7"
    assert (found.hint, found.detail) == ("put one into slot 7", "slot 7 is empty")


def test_what_no_table_knows_stays_as_it_is() -> None:
    unknown = broken_torch("fan")
    assert explain_torch(unknown, [spec()]) is unknown
    missing = TorchFailure("torch cannot be imported: it is not installed", "install it")
    assert explain_torch(missing, [spec()]) == missing


@pytest.mark.parametrize(
    ("text", "cause", "cure"),
    [
        (
            "RuntimeError: Failed to load the backend extension: torch_acme. You can disable extension auto-loading\n"
            "ImportError: libacme.so: cannot open shared object file",
            "the extension torch_acme, which torch loads by itself, fails: ImportError: libacme.so: cannot open",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ),
        (
            "AttributeError: partially initialized module 'torch' from '/x/torch.py' has no 'a' (most likely)",
            "a module in the way has the name of one of torch's",
            "rename the file",
        ),
        (
            "ImportError: /lib/libgomp.so.1: cannot allocate memory in static TLS block",
            "/lib/libgomp.so.1 was loaded too late",
            "LD_PRELOAD=/lib/libgomp.so.1",
        ),
        (
            "ImportError: /lib64/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by libtorch.so)",
            "this system's C or C++ library lacks GLIBCXX_3.4.30",
            "for this system",
        ),
        (
            "ImportError: libx.so: undefined symbol: _ZNK3c10",
            "libraries of different versions are mixed (undefined symbol _ZNK3c10)",
            "reinstall torch",
        ),
        (
            "OSError: [WinError 126] The specified module could not be found. Error loading c10.dll",
            "a DLL that torch needs",
            "Visual C++",
        ),
        (
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            "this is a CUDA build of torch, and its CUDA library libcudart.so.12 is not found",
            "LD_LIBRARY_PATH",
        ),
    ],
)
def test_the_ways_in_which_torch_itself_breaks(text: str, cause: str, cure: str) -> None:
    found = explain_torch(broken_torch(text), BUILT_INS)
    assert found.reason.startswith(f"torch cannot be imported: {cause}")
    assert cure in found.hint
    assert found.detail == text


def test_every_pattern_compiles_and_every_row_has_a_cure() -> None:
    rows = [row for spec in BUILT_INS for row in table_of(spec)] + list(causes._TORCH_CAUSES)
    for row in rows:
        if isinstance(row, Cause):
            assert row(failure("no such text")) is None
            assert row.cause
            assert row.cure


# --- as an installed distribution: one file, one entry point, and an extension that loads itself with torch


ACME = """
from xamp.contract import Backend, BackendSpec, Cause
SPEC = BackendSpec("acme", ("cpu",), "acme_plugin:AcmeBackend", causes="acme_plugin:CAUSES")
CAUSES = (Cause(r"(libacme\\S*): cannot open", r"the toolkit is not found (\\1)", "source acme.sh"),)
class AcmeBackend(Backend):
    pass
"""
EXTENSION = """
def start():
    raise ImportError("libacme.so.1: cannot open shared object file: No such file or directory")
"""
ASK = """
import json, xamp
rows = [[row.name, row.reason, row.hint, row.detail] for row in xamp.available_backends()]
try:
    xamp.initialize
except xamp.BackendUnavailable as error:
    print(json.dumps([rows, str(error)]))
"""


@pytest.fixture(scope="module")
def acme_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acme")
    distribution(folder, "xamp-acme", "acme = acme_plugin:SPEC", acme_plugin=ACME)
    distribution(folder, "torch-acme", "torch_acme = torch_acme:start", "torch.backends", torch_acme=EXTENSION)
    return folder


CAUSE = "torch cannot be imported: the toolkit is not found (libacme.so.1)"


def test_a_third_party_s_table_explains_a_torch_that_its_extension_breaks(acme_site: Path) -> None:
    environment = plain_environment(acme_site)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    rows, said = json.loads(done.stdout)
    assert {name for name, *_ in rows} >= {"acme", "cpu", "cuda"}
    assert {(reason, hint) for _, reason, hint, _ in rows} == {(CAUSE, "source acme.sh")}
    assert all("caused by ImportError: libacme.so.1: cannot open shared object" in detail for *_, detail in rows)
    assert said == f"xamp.initialize needs torch >= {MINIMUM}, but {CAUSE}\nsource acme.sh"


def test_the_doctor_says_the_same_and_that_torch_works_without_the_extension(acme_site: Path) -> None:
    found = doctor_finds(folder=acme_site, code=1)
    assert found["torch"]["reason"] == CAUSE
    cure, without = found["torch"]["hint"].splitlines()
    assert cure == "source acme.sh"
    assert "itself can be imported: with TORCH_DEVICE_BACKEND_AUTOLOAD=0, which leaves out torch_acme" in without
    assert "torch-acme 1.5" in without
    assert "Failed to load the backend extension: torch_acme" in found["torch"]["detail"]
    acme = row_of(found, "acme", "xamp-acme 1.5")
    assert (acme["usable"], acme["reason"], acme["hint"]) == (False, CAUSE, "source acme.sh")
    assert found["ok"] is False


def test_without_the_extension_the_same_installation_works(acme_site: Path) -> None:
    found = doctor_finds(folder=acme_site, code=0, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert row_of(found, "acme", "xamp-acme 1.5")["usable"] is True
    assert found["environment"].items() >= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}.items()  # and what hides devices


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        *[
            ("1.13.0", False),
            (f"{OLDER}+cu121", False),
            ("2.7", False),
            (f"{MINIMUM}+cpu", True),
            ("2.99.0a0", True),
            ("3.0", True),
        ],
        # As texts these two stand in the other order.
        *[("2.9.1", True), ("2.10.0", True), ("2.10", True)],
    ],
)
def test_a_torch_that_is_too_old_is_refused(version: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    torch.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(find_torch, "_first_failure", None)
    found = find_torch.find_torch()
    if taken:
        assert found is torch
    else:
        assert isinstance(found, TorchFailure)
        assert found.reason == f"torch {version} is older than {MINIMUM}"


def test_without_a_torch_that_works_the_error_says_who_needs_it_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = broken_torch("no library here")
    monkeypatch.setattr(registry, "find_torch", lambda: found)
    with pytest.raises(BackendUnavailable) as error:
        registry.require_torch("the call")
    said = f"the call needs torch >= {MINIMUM}, but torch cannot be imported: no library here\nrepair it"
    assert str(error.value) == said
    assert error.value.__cause__ is found.error
