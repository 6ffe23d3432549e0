"""``import apex`` of an unmodified script, with and without another package of that name.

Covers: xamp.apex._install, xamp.apex._modules, xamp.apex._real.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_python import python
from gathering import cases
from site_packages import plain_environment

import xamp.apex
from xamp.apex import _install, _modules, _real
from xamp.errors import PolicyError


@pytest.fixture
def installed() -> Iterator[None]:
    xamp.apex.install()
    yield
    xamp.apex.uninstall()


def _package(folder: Path, *files: str) -> Path:
    for name in ("__init__.py", *files):
        path = folder / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"WHO = {name!r}\n")
    return folder


def test_names_are_those_of_xamp(installed: None) -> None:
    import apex  # type: ignore[import-not-found]
    from apex import amp
    from apex.amp import initialize  # type: ignore[import-not-found]

    assert apex.amp.initialize is initialize is amp.initialize is xamp.apex.amp.initialize
    assert importlib.import_module("apex.amp") is apex.amp is amp
    assert apex.__path__ == []


ASCENDS = {
    "lamb": "Lamb",
    "npu_fused_adadelta": "NpuFusedAdadelta",
    "npu_fused_adam": "NpuFusedAdam",
    "npu_fused_adamp": "NpuFusedAdamP",
    "npu_fused_adamw": "NpuFusedAdamW",
    "npu_fused_bert_adam": "NpuFusedBertAdam",
    "npu_fused_lamb": "NpuFusedLamb",
    "npu_fused_rmsprop": "NpuFusedRMSprop",
    "npu_fused_rmsprop_tf": "NpuFusedRMSpropTF",
    "npu_fused_sgd": "NpuFusedSGD",
}


def test_ascend_has_a_module_for_each_optimizer(installed: None) -> None:
    for file, name in ASCENDS.items():
        module = importlib.import_module(f"apex.optimizers.{file}")
        assert getattr(module, name) is getattr(xamp.apex.optimizers, name)


def test_a_schedule_of_bert_is_called_by_hand(installed: None) -> None:
    schedules = importlib.import_module("apex.optimizers.npu_fused_bert_adam").SCHEDULES
    assert {name: call(0.001) for name, call in schedules.items()} == dict.fromkeys(schedules, 0.5)
    assert schedules["warmup_poly"](0.75) == 0.5
    assert schedules["warmup_linear"](0.501) == pytest.approx(0.5)
    assert schedules["warmup_linear"](0.75, 0.5) == 0.5


def test_what_a_script_sets_is_set_in_xamp(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    served = importlib.import_module("apex.amp")
    monkeypatch.setattr(xamp.apex.amp, "scale_loss", xamp.apex.amp.scale_loss)  # put back where undoing removes it
    monkeypatch.setattr(served, "scale_loss", "mine")
    assert xamp.apex.amp.scale_loss == "mine"  # type: ignore[comparison-overlap]


def test_uninstall_leaves_no_trace() -> None:
    modules, finders = {*sys.modules}, list(sys.meta_path)
    xamp.apex.install()
    xamp.apex.install()
    importlib.import_module("apex.amp")
    xamp.apex.uninstall()
    assert _install.is_installed()
    xamp.apex.uninstall()
    xamp.apex.uninstall()
    assert sys.meta_path == finders
    assert not {name for name in {*sys.modules} - modules if name.startswith("apex")}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex")


def test_what_is_left_out_says_what_to_use_and_is_not_found(installed: None) -> None:
    with cases() as case:
        for name in _modules.LEFT_OUT:
            with case(name):
                parent, _, last = name.rpartition(".")
                text = rf"{name} is not part of xamp: (use|write) .* instead\. docs/apex\.md lists"
                with pytest.raises(ImportError, match=text) as caught:
                    importlib.import_module(name)
                assert caught.value.name == name
                with pytest.raises(ImportError, match=text):
                    importlib.import_module(f"xamp.{name}")
                if parent in ("apex", "apex.contrib"):
                    with pytest.raises(ImportError, match="instead"):
                        getattr(importlib.import_module(f"xamp.{parent}"), last)
                assert name.count(".") > 2 or importlib.util.find_spec(name) is None
                assert name not in _modules.MODULES
    assert importlib.util.find_spec("apex.amp") is not None
    assert importlib.util.find_spec("apex.contrib.xentropy") is not None


def test_a_compiled_module_of_apex_is_missing_and_says_what_to_use(installed: None) -> None:
    for name in _modules.EXTENSIONS:
        text = r"not part of xamp, which needs no compiled module: use "
        with pytest.raises(ModuleNotFoundError, match=text) as caught:
            importlib.import_module(name)
        assert caught.value.name == name
        assert importlib.util.find_spec(name) is None


def test_a_module_of_the_script_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    (tmp_path / "syncbn.py").write_text("WHO = 'mine'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "syncbn", raising=False)
    assert importlib.import_module("syncbn").WHO == "mine"
    del sys.modules["syncbn"]


def test_unknown_names_are_missing_modules(installed: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"apex\.nonsense"):
        importlib.import_module("apex.nonsense")


CASES = {
    "real": (("amp/__init__.py",), "real", False, "the installed an Apex|an Apex with apex.amp is used"),
    "real, asked": (("amp/__init__.py",), "xamp", True, "as asked for"),
    "real without amp": (("optimizers/__init__.py",), "real", False, "no apex.amp"),
    "impostor": (("interfaces.py",), "real", True, "Pyramid"),
    "impostor, asked": (("interfaces.py",), "xamp", True, "Pyramid"),
}


@pytest.mark.parametrize("case", CASES)
def test_another_package_of_that_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, prefer, answered, says = CASES[case]
    xamp.apex.install(prefer)
    monkeypatch.syspath_prepend(_package(tmp_path, *files))  # after install, as a script's own folder is
    try:
        with caplog.at_level(logging.WARNING, "xamp"):
            found = importlib.import_module("apex")
        assert hasattr(found, "WHO") is not answered
        assert len(caplog.messages) == 1
        assert any(part in caplog.text for part in says.split("|"))
    finally:
        xamp.apex.uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
            del sys.modules[name]


def test_a_second_install_that_asks_for_xamp_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_package(tmp_path, "amp/__init__.py"))

    def who() -> str:
        return "real" if hasattr(importlib.import_module("apex.amp"), "WHO") else "xamp"

    xamp.apex.install()
    assert who() == "real"
    before = sys.modules["apex.amp"]
    xamp.apex.install("xamp")
    assert who() == "xamp"
    xamp.apex.install()  # the default takes nothing from who asked for xamp
    assert who() == "xamp"
    xamp.apex.uninstall()
    assert who() == "xamp"
    xamp.apex.uninstall()
    assert who() == "real"
    assert sys.modules["apex.amp"] is before
    xamp.apex.uninstall()
    assert not _install.is_installed()
    assert sys.modules["apex.amp"] is before
    for name in ("apex", "apex.amp"):
        del sys.modules[name]


def test_wrong_use() -> None:
    with pytest.raises(PolicyError, match=r"install\(prefer='mine'\): must be one of 'real', 'xamp'"):
        xamp.apex.install("mine")
    assert not _install.is_installed()


def test_without_torch_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import xamp; xamp.apex.install()\n"
        "for text in ('from xamp.apex import amp', 'from apex import amp', 'xamp.apex.amp'):\n"
        "    try: exec(text)\n"
        "    except xamp.BackendUnavailable as error: print('pip install' in str(error), 'apex' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 6, done.stdout + done.stderr


# ---------------------------------------------------------------- a package named apex

KINDS = {
    "real": (("amp/__init__.py", "optimizers/__init__.py"), True, "an Apex with apex.amp"),
    "real, amp a file": (("amp.py",), True, "an Apex with apex.amp"),
    "without amp": (("normalization/__init__.py", "optimizers/__init__.py"), False, "removed in 2025"),
    "impostor": (("interfaces.py", "lib/__init__.py"), False, "Pyramid"),
}


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a package of one kind that raises when it is imported."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    for name in KINDS[request.param][0]:
        (tmp_path / "apex" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "apex" / name).touch()
    info = tmp_path / "apex-0.9.10.dev0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n", encoding="utf-8")
    return tmp_path


def test_none_is_here() -> None:
    assert _real.find() is None


@pytest.mark.parametrize(("site", "kind"), [(kind, kind) for kind in KINDS], indirect=["site"])
def test_it_is_told_without_being_imported(site: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    found = _real.find()
    _, has_amp, says = KINDS[kind]
    assert found is not None
    assert (found.has_amp, found.version) == (has_amp, "0.9.10.dev0")
    assert says in found.says


@pytest.mark.slow
@pytest.mark.parametrize("site", ["impostor"], indirect=True)
@pytest.mark.parametrize("option", ["--json", "--report", ""])
def test_doctor_names_it(site: Path, option: str) -> None:
    command = [python(), "-m", "xamp", "doctor", *option.split()]
    done = subprocess.run(command, env=plain_environment(site), capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)["apex"]["says"] if option == "--json" else " ".join(done.stdout.split())
    assert "pip uninstall apex" in said
    assert "from xamp.apex import amp" in said
