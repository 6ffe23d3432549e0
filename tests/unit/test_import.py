"""What importing xamp does and does not do, and what it says where torch is missing or broken.

Covers: xamp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import MINIMUM, OLDER

import xamp
from xamp.apex._modules import MODULES

ROOT = Path(__file__).resolve().parents[2]
NO_TORCH = "import sys; sys.modules['torch'] = None; "
PIP = 'pip install "xamp[torch]"'

EFFECTS = """
import json, logging, os, sys, warnings
before = dict(os.environ), list(warnings.filters), sys.excepthook, list(sys.meta_path)
modules = set(sys.modules)
import xamp
public = [name for name in dir(xamp) if not name.startswith("_")]
new = sorted(set(sys.modules) - modules)
print(json.dumps({
    "new": new,
    "unchanged": before == (dict(os.environ), list(warnings.filters), sys.excepthook, list(sys.meta_path)),
    "handlers": len(logging.getLogger().handlers) + len(logging.getLogger("xamp").handlers),
    "level": logging.getLogger("xamp").level,
    "public": public,
}))
"""


def run(code: str, *paths: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process that finds this xamp, and before it what is in ``paths``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XAMP_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, ROOT]))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def effects() -> dict[str, object]:
    done = run(EFFECTS)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_importing_xamp_imports_no_torch_and_no_part_of_xamp(effects: dict[str, object]) -> None:
    new = effects["new"]
    assert isinstance(new, list)
    assert "xamp" in new
    assert [name for name in new if name.split(".")[0] in ("torch", "numpy")] == []
    assert [name for name in new if name.startswith("xamp.")] == []


def test_importing_xamp_changes_nothing(effects: dict[str, object]) -> None:
    assert effects["unchanged"] is True
    assert (effects["handlers"], effects["level"]) == (0, 0)


def test_dir_shows_exactly_the_public_names(effects: dict[str, object]) -> None:
    assert sorted(effects["public"]) == sorted(set(xamp.__all__) - {"__version__"})  # type: ignore[call-overload]
    assert "__version__" in dir(xamp)
    assert len(xamp.__all__) == len(set(xamp.__all__))


def test_every_public_name_has_a_home() -> None:
    assert set(xamp._HOME_OF) == set(xamp.__all__) - {"__version__"}


def test_no_public_name_is_that_of_a_submodule() -> None:
    folder = Path(xamp.__file__).parent
    submodules = {entry.stem if entry.suffix == ".py" else entry.name for entry in folder.iterdir()}
    assert "backends" in submodules
    assert set(xamp.__all__) & submodules == {"accel", "apex", "debug"}  # which are the modules themselves


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'xamp' has no attribute 'initialise'"):
        _ = xamp.initialise  # type: ignore[attr-defined]
    assert not hasattr(xamp, "initialise")


WITHOUT_TORCH = [
    "contract",
    "errors",
    "policy",
    "registry.registry",
    "registry.plugins",
    "registry.probe",
    "registry.find_torch",
    "registry.causes",
    "registry.findings",
    "doctor.machine",
    "doctor.known",
    "doctor.children",
    "doctor.examine",
    "cli",
    "cli.doctor",
    "backends.cuda_causes",
]
SEEKERS = """
import importlib, json, sys
seekers = []
for name in sys.argv[1:]:
    importlib.import_module(f"xamp.{name}")
    if sys.modules.pop("torch", None):
        seekers.append(name)
print(json.dumps(seekers))
"""


def test_what_must_work_without_torch_imports_none(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # it is imported anew by each that imports it
    done = run(SEEKERS, tmp_path, arguments=(*WITHOUT_TORCH,))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == []


# --- torch missing, torch broken


@pytest.fixture
def broken_torch(tmp_path: Path) -> Path:
    """A folder with a torch that fails like one whose extension finds no driver: late, wrapped, and once only so."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys\n"
        "if 'torch.half_way' in sys.modules:\n"
        "    raise RuntimeError('function already has a docstring')\n"
        "import torch.half_way\n"
        "try:\n"
        "    raise ImportError('libacme.so: cannot open shared object file')\n"
        "except ImportError as error:\n"
        "    raise RuntimeError('Failed to load the backend extension: torch_acme.') from error\n"
    )
    (package / "half_way.py").write_text("")
    return tmp_path


USE = """
import xamp
try:
    xamp.{name}
except xamp.BackendUnavailable as error:
    print(error)
    print("cause:", type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("name", ["initialize", "scale_loss", "device"])
def test_without_torch_the_first_use_says_what_to_install(name: str) -> None:
    done = run(NO_TORCH + USE.format(name=name))
    assert done.returncode == 0, done.stderr
    first, second, cause = done.stdout.splitlines()
    assert first == f"xamp.{name} needs torch >= {MINIMUM}, but torch cannot be imported: it is not installed"
    assert PIP in second
    assert "the vendor's build of torch first" in second
    assert cause == "cause: ModuleNotFoundError"


@pytest.mark.parametrize("code", ["from xamp.apex import amp", "import xamp; xamp.apex.amp"])
def test_without_torch_apexs_amp_says_what_to_install(code: str) -> None:
    done = run(f"{NO_TORCH}\ntry:\n    {code}\nexcept Exception as error:\n    print(error)")
    assert done.returncode == 0, done.stderr
    assert f"xamp.apex.amp needs torch >= {MINIMUM}, but torch cannot be imported: it is not installed" in done.stdout
    assert PIP in done.stdout


def _modules_of_apex() -> list[str]:
    """The module of xamp for each module of Apex; a submodule is imported after its package."""
    served = {name for name in MODULES.values() if name != "xamp.apex"}
    return sorted(name for name in served if name.rpartition(".")[0] in ("xamp.apex", "xamp.apex.contrib"))


def test_without_torch_every_module_of_apex_says_what_to_install() -> None:
    names = [name for name in _modules_of_apex() if not name.rpartition(".")[2].startswith("_")]
    assert len(names) >= 12
    code = (
        f"import importlib\nfor name in {names!r}:\n    try:\n        importlib.import_module(name)\n"
        "    except Exception as error:\n        print(type(error).__name__, '|'.join(str(error).splitlines()))\n"
        "    else:\n        print('imported', name)\n"
    )
    done = run(NO_TORCH + "\n" + code)
    assert done.returncode == 0, done.stderr
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        said = name if name.count(".") == 2 else "xamp.apex.contrib"  # the package of these is imported first
        assert line.startswith(
            f"BackendUnavailable {said} needs torch >= {MINIMUM}, but torch cannot be imported: it is not installed"
        ), line
        assert PIP in line


def test_with_a_broken_torch_the_first_use_gives_its_error_every_time(broken_torch: Path) -> None:
    done = run(USE.format(name="initialize") + USE.format(name="initialize"), broken_torch)
    assert done.returncode == 0, done.stderr
    first, second, cause = done.stdout.splitlines()[:3]
    assert first == (
        f"xamp.initialize needs torch >= {MINIMUM}, but torch cannot be imported: the extension torch_acme, which "
        "torch loads by itself, fails: ImportError: libacme.so: cannot open shared object file"
    )
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in second
    assert cause == "cause: RuntimeError"
    assert done.stdout.splitlines()[3:] == done.stdout.splitlines()[:3]


@pytest.mark.parametrize("error", ["OSError('x')", "SystemExit(4)", "Exception()", "ImportError('libhccl.so')"])
def test_whatever_torch_raises_becomes_the_typed_error(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}")
    done = run(USE.format(name="initialize"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"torch cannot be imported: {error.partition('(')[0]}" in done.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"__version__ = '{OLDER}+cu121'", f"but torch {OLDER}+cu121 is older than {MINIMUM}"),
        ("__version__ = '1.13.0'", f"but torch 1.13.0 is older than {MINIMUM}"),
        ("", "is not PyTorch"),
    ],
)
def test_a_torch_that_xamp_cannot_use_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "torch.py").write_text(text)
    done = run(USE.format(name="initialize"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout


REPORTS = """
import json, xamp
print(json.dumps([[row.name, row.usable, row.reason, row.hint] for row in xamp.available_backends()]))
"""


def test_without_torch_every_backend_has_the_one_reason() -> None:
    done = run(NO_TORCH + REPORTS)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {"cpu", "cuda"} <= {name for name, *_ in rows}
    assert {reason for _, _, reason, _ in rows} == {"torch cannot be imported: it is not installed"}
    assert not any(usable for _, usable, _, _ in rows)
    assert all(PIP in hint for *_, hint in rows)


def test_with_a_broken_torch_every_backend_has_the_one_reason(broken_torch: Path) -> None:
    done = run(REPORTS, broken_torch)
    assert done.returncode == 0, done.stderr
    reasons = {reason for _, _, reason, _ in json.loads(done.stdout)}
    assert len(reasons) == 1
    assert reasons.pop().startswith("torch cannot be imported: the extension torch_acme, which torch")


def test_registering_needs_no_torch() -> None:
    code = "import xamp, xamp.contract as c; xamp.register_backend(c.BackendSpec('x', ('cpu',), 'a:B'))"
    done = run(NO_TORCH + code)
    assert (done.returncode, done.stderr) == (0, "")
