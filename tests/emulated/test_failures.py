"""Each way in which an NPU cannot be used, brought about with the real torch_npu, and what xamp says: cause and cure.

The real torch_npu meets a CANN that is missing, damaged or broken: the emulation's stand-in, less something. What xamp
says is asked in a process of its own for each, two at a time.

Texts alone are held, in tests/unit/registry/test_npu_causes.py, of what takes a machine that this is not: CANN's EZ1001
in its own words, no room for static TLS on aarch64, memory that is used up.

Covers: backends.npu.causes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from emulated_cards import need_emulation

import xamp
from xamp.backends.npu import emulation
from xamp.backends.npu.emulation import cuda_half, library, wheel

pytestmark = pytest.mark.slow

ASK = """
import json, os, xamp
row = next(row for row in xamp.available_backends() if row.name == "npu")
os.environ["XAMP_DEVICE"] = "npu"
try:
    told = str(xamp.device())
except xamp.BackendUnavailable as error:
    told = str(error)
print(json.dumps({"usable": row.usable, "cause": row.reason, "cure": row.hint, "detail": row.detail, "told": told}))
"""
EXPLAIN = """
import json
from xamp.registry.causes import Failure, explain, full_text
from xamp.registry.registry import BUILT_INS
spec = next(spec for spec in BUILT_INS if spec.name == "npu")
try:
    fail()
except Exception as error:
    known = explain(spec, Failure("exception", full_text(error)))
    found = {"usable": False, "cause": known.cause, "cure": known.cure, "told": f"{known.cause}\\n{known.cure}"}
    print(json.dumps({**found, "detail": str(error)}))
"""
SET_ENV = "source the set_env.sh of the CANN installation"
UPDATE = "update CANN, kernels included"
NPU_SMI = "npu-smi info"


@dataclasses.dataclass
class Machine:
    """What a child runs with.

    Attributes:
        folder: of its own.
        code: what it runs.
        path: where it finds torch_npu.
        cann: its LD_LIBRARY_PATH.
        settings: other environment variables.
        here: this process's own, as they are when the machine is made.

    Where torch is built for CUDA that half is taken out, as it is for an emulated card.
    """

    folder: Path
    code: str = ASK
    path: list[Path] = dataclasses.field(default_factory=wheel.folders)
    cann: list[Path] = dataclasses.field(default_factory=lambda: [library.build()])
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    here: dict[str, str] = dataclasses.field(default_factory=os.environ.copy)

    def __post_init__(self) -> None:
        if stand_in := cuda_half.stand_in():
            self.settings["XAMP_EMULATED_NO_CUDA"] = str(stand_in)
            (self.folder / "sitecustomize.py").write_text(NO_CUDA)
            self.path.insert(0, self.folder)

    def environment(self) -> dict[str, str]:
        """All of it."""
        bare = {name: value for name, value in self.here.items() if not name.startswith(("ASCEND_", "XAMP_EMULATED_"))}
        folders = [*self.path, Path(xamp.__file__).parents[1]]
        path, cann = (os.pathsep.join(map(str, each)) for each in (folders, self.cann))
        return {**bare, "PYTHONPATH": path, "LD_LIBRARY_PATH": cann, "OMP_NUM_THREADS": "1", **self.settings}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=200, env=self.environment(), check=False
        )

    def answer(self) -> dict[str, str]:
        done = self.run("-c", self.code)
        said = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert said, f"{done.stdout}\n{done.stderr}"
        return {**json.loads(said[-1]), "printed": done.stdout + done.stderr}


# ---- what is done to it


def no_cann(machine: Machine) -> None:
    machine.cann = []


def without(soname: str) -> Callable[[Machine], None]:
    def damage(machine: Machine) -> None:
        kept = [library.CORE, *(name for name in library.SONAMES if name != soname)]
        for name in kept:
            shutil.copy(machine.cann[0] / name, machine.folder)
        machine.cann = [machine.folder]

    return damage


def no_driver(machine: Machine) -> None:
    """CANN in a container: its libascendcl needs the driver's libascend_hal, which is the host's."""
    without("libascendcl.so")(machine)
    driver = machine.folder / "libascend_hal.so"
    compile_c(driver, "", "-Wl,-soname,libascend_hal.so")
    needed = ("-Wl,--no-as-needed", str(machine.folder / library.CORE), str(driver))
    compile_c(machine.folder / "libascendcl.so", "", "-Wl,-soname,libascendcl.so", *needed)
    driver.unlink()


def less(function: str) -> Callable[[Machine], None]:
    """A CANN that does not have ``function`` yet."""

    def damage(machine: Machine) -> None:
        core = library._SOURCE.read_text().replace(f"{function}(", f"newer_{function}(")
        core = core.replace(f"DONE({function})", f"DONE(newer_{function})")
        without("")(machine)
        compile_c(machine.folder / library.CORE, core, f"-Wl,-soname,{library.CORE}")

    return damage


def fails(function: str, code: int) -> Callable[[Machine], None]:
    def damage(machine: Machine) -> None:
        preloaded = machine.folder / "fails.so"
        compile_c(preloaded, f"int {function}(void) {{ return {code}; }}")
        machine.settings["LD_PRELOAD"] = str(preloaded)

    return damage


def compile_c(made: Path, source: str, *flags: str) -> None:
    text = made.with_suffix(".c")
    text.write_text(source)
    library._run([*library._compiler(), *library._FLAGS, str(text), *flags, "-o", str(made)])


def home(*there: str, opp: bool = True) -> Callable[[Machine], None]:
    """A set_env.sh of which a part is missing: ``there`` are the folders of an installation."""

    def damage(machine: Machine) -> None:
        for name in there:
            (machine.folder / name).mkdir()
        machine.settings["ASCEND_HOME_PATH"] = str(machine.folder)
        if opp:
            machine.settings["ASCEND_OPP_PATH"] = str(machine.folder / "opp")

    return damage


def settings(**variables: str) -> Callable[[Machine], None]:
    return lambda machine: machine.settings.update(variables)


def links(machine: Machine, leave_out: str) -> Path:
    """A torch_npu of links to the real one's files, first on the path, less those that begin with ``leave_out``."""
    real = next(folder for folder in machine.path if (folder / "torch_npu").is_dir()) / "torch_npu"
    made = machine.folder / "torch_npu"
    made.mkdir()
    for file in real.iterdir():
        if not file.name.startswith(leave_out):
            (made / file.name).symlink_to(file)
    machine.path.insert(0, machine.folder)
    return real


def other_torch(machine: Machine) -> None:
    """A torch_npu of another torch: a function that it needs of torch is called otherwise."""
    real = links(machine, "lib")
    folder = machine.folder / "torch_npu" / "lib"
    folder.mkdir()
    for file in (real / "lib").iterdir():
        if file.name != "libtorch_npu.so":
            (folder / file.name).symlink_to(file)
    binary = (real / "lib" / "libtorch_npu.so").read_bytes()
    name = re.search(rb"\0(_ZN3c106detail14torchCheckFail\w+)\0", binary)
    assert name is not None
    (folder / "libtorch_npu.so").write_bytes(binary.replace(name[0], name[0][:-2] + b"X\0"))


def source_tree(machine: Machine) -> None:
    links(machine, "_C")


def empty_folder(machine: Machine) -> None:
    (machine.folder / "torch_npu").mkdir()
    (machine.folder / "torch_npu" / "__init__.py").touch()
    machine.path.insert(0, machine.folder)


def cuda_build(machine: Machine) -> None:
    """A torch that says it is built for CUDA, when torch_npu asks."""
    with (machine.folder / "sitecustomize.py").open("a") as file:
        file.write(TWO)
    machine.path.insert(0, machine.folder)


TWO = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch_npu":
            torch = sys.modules["torch"]
            torch._C._get_accelerator = lambda *args: torch.device("cuda")
sys.meta_path.insert(0, Finder)
"""
NO_CUDA = """
import sys
class NoCuda:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("torch", "torch._C"):
            from xamp.backends.npu.emulation import cuda_half
            return cuda_half.find_spec(name, path)
sys.meta_path.insert(0, NoCuda)
"""


def not_installed(machine: Machine) -> None:
    machine.path, machine.cann = [], []


def emulated(soc: str, code: str) -> Callable[[Machine], None]:
    """On an emulated card, whose operators work."""

    def prepared(machine: Machine) -> None:
        machine.path, machine.cann = [], []
        machine.settings.update(emulation.prepare(soc))
        machine.code = code

    return prepared


FORK = f"""
import multiprocessing, torch
torch.ones(1, device="npu")
def ask():
    {"    ".join(ASK.splitlines(keepends=True))}
process = multiprocessing.get_context("fork").Process(target=ask)
process.start()
process.join()
"""
# An operator has torch_npu's own kernel, which looks for CANN's. xamp does without this one, and the device is usable.
NO_KERNEL = f"""
import functools, os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch, xamp
put = torch.library.Library.impl
@functools.wraps(put)
def put_but_one(library, name, *rest, **options):
    if name != "_amp_foreach_non_finite_check_and_unscale_":
        put(library, name, *rest, **options)
torch.library.Library.impl = put_but_one
assert [row.usable for row in xamp.available_backends() if row.name == "npu"] == [True]
def fail():
    one = torch.ones(1, device="npu")
    torch._amp_foreach_non_finite_check_and_unscale_([one], one.clone(), one.clone())
{EXPLAIN}
"""
BF16 = f"""
import torch
def fail():
    torch.ones(2, device="npu").bfloat16() + 1
{EXPLAIN}
"""
NNAL = f"""
import ctypes, pathlib, sys, torch
def fail():
    ctypes.CDLL(str(pathlib.Path(sys.modules["torch_npu"].__file__).parent / "lib" / "libop_plugin_atb.so"))
{EXPLAIN}
"""
LOAD = "torch cannot be imported: "
BY_HALF = LOAD + "the environment of CANN is set by half: "

CASES: dict[str, tuple[Callable[[Machine], None], str, str]] = {
    # The name: what is done, the cause, a part of the cure. The longest first.
    "operators queued": (
        settings(),
        "the operator OnesLike failed, and torch_npu says why",
        "ASCEND_LAUNCH_BLOCKING=1",
    ),
    "forked": (emulated("", FORK), "a process that was forked after the NPU was in use cannot use it", '"spawn"'),
    "torch_npu missing": (not_installed, r"torch_npu is not installed beside torch 2\.", "pip install torch-npu=="),
    "CANN missing": (no_cann, LOAD + r"CANN is not installed, .*: libhccl\.so is not found", SET_ENV),
    **{
        f"{soname} missing": (without(soname), LOAD + rf"CANN is not installed, .*: {soname} is not found", SET_ENV)
        for soname in library.SONAMES
    },
    "driver missing": (no_driver, LOAD + r"the Ascend driver is missing: libascend_hal\.so", "in a container mount"),
    "NNAL missing": (emulated("", NNAL), r"NNAL is not installed, .*: libatb\.so is not found", "NNAL package"),
    "home wrong": (
        settings(ASCEND_HOME_PATH="/x"),
        LOAD + "ASCEND_HOME_PATH points to /x, which is not there",
        SET_ENV,
    ),
    "opp not set": (home("runtime", "compiler", opp=False), BY_HALF + "ASCEND_OPP_PATH is missing", SET_ENV),
    "opp wrong": (home("runtime", "compiler"), LOAD + "ASCEND_OPP_PATH points to .*opp, which is not there", SET_ENV),
    "runtime missing": (home("opp", "compiler"), LOAD + "ASCEND_RUNTIME_PATH points to .*, which is not", SET_ENV),
    "compiler missing": (home("opp", "runtime"), LOAD + "ASCEND_COMPILER_PATH points to .*, which is not", SET_ENV),
    "no device": (settings(XAMP_EMULATED_DEVICES="0"), "there is no Ascend device", NPU_SMI),
    "masked": (
        settings(ASCEND_RT_VISIBLE_DEVICES=""),
        "no device is visible under ASCEND_RT_VISIBLE_DEVICES=''",
        "unset ASCEND_RT_VISIBLE_DEVICES",
    ),
    "driver error": (fails("aclrtGetDeviceCount", 507899), "the Ascend driver fails", "reinstall the driver"),
    "no SoC": (fails("aclInit", 507008), "CANN cannot tell which chip this is", "update driver and firmware"),
    "other error": (fails("aclrtSetDevice", 507033), r"CANN fails \(error code 507033\)", NPU_SMI),
    "unknown SoC": (
        settings(XAMP_EMULATED_SOC="Ascend999"),
        "this torch_npu does not know the chip Ascend999",
        "newer",
    ),
    "other torch": (other_torch, LOAD + "torch_npu was built for another version of torch", "pip install torch-npu=="),
    "source tree": (source_tree, LOAD + "a folder named torch_npu is in the way", "another folder"),
    "empty folder": (empty_folder, LOAD + "a folder named torch_npu is in the way", "another folder"),
    "CUDA build": (cuda_build, LOAD + "this is a build of torch for another accelerator", "install the CPU build"),
    "CANN older": (less("aclrtMemset"), LOAD + "CANN is older than this torch_npu: it has no aclrtMemset$", UPDATE),
    "CANN older, looked up": (
        less("aclrtSetDeviceSatMode"),
        "CANN is older than this torch_npu: it has no aclrtSetDeviceSatMode$",
        UPDATE,
    ),
    "CANN older, operator": (
        emulated("", NO_KERNEL),
        "CANN is older than this torch_npu: it has no aclnnForeachNonFiniteCheckAndUnscale$",
        UPDATE,
    ),
    "no kernels": (
        settings(TASK_QUEUE_ENABLE="0"),
        r"CANN cannot run the operator OnesLike \(error",
        "kernels package",
    ),
    "no bfloat16": (emulated("Ascend910A", BF16), "this chip does not compute in bfloat16", "use O1 or O2"),
}
DOCTORED = ("CANN missing", "driver missing", "CANN older", "no device")
"""What doctor is asked about too, which takes longer."""


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[dict[str, str]]]]:
    """The answers to what was chosen of the cases, all asked.

    The machines are made before a thread starts: pytest writes each phase of a test into this process's environment,
    and a compiler that a thread starts meanwhile with that environment can find it moved (execv: EFAULT).
    """
    need_emulation()
    emulation.prepare()
    chosen = {item.name.partition("[")[2][:-1] for item in request.session.items if item.path == request.path}
    machines = {name: made(name, tmp_path_factory.mktemp("machine")) for name in CASES if name in chosen}
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(ask, name, machine) for name, machine in machines.items()}
        pool.shutdown(cancel_futures=True)


def made(name: str, folder: Path) -> Machine:
    machine = Machine(folder)
    CASES[name][0](machine)
    return machine


def ask(name: str, machine: Machine) -> dict[str, str]:
    answer = machine.answer()
    if name in DOCTORED:
        answer["doctor"] = machine.run("-m", "xamp", "doctor", "--json").stdout
    return answer


@pytest.mark.drawn(8, keep=("operators queued", "forked"))
@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_answered_with_its_cause_and_cure(name: str, started: dict[str, Future[dict[str, str]]]) -> None:
    _, cause, cure = CASES[name]
    answer = started[name].result()
    assert not answer["usable"]
    assert re.match(cause, answer["cause"]), answer
    assert cure in answer["cure"], answer
    assert answer["cause"] in answer["told"], "who asks for the device is told it"
    assert cure in answer["told"]
    assert answer["detail"] or name in ("torch_npu missing", "masked"), "the error itself is kept"
    if name in DOCTORED:
        doctored(answer, cause, cure)


def doctored(answer: dict[str, str], cause: str, cure: str) -> None:
    report = json.loads(answer["doctor"])
    row = next(row for row in report["backends"] if row["name"] == "npu")
    assert (row["usable"], row["reason"]) == (False, answer["cause"])
    assert cure in row["hint"]
    assert row["findings"] == []
    if cause.startswith(LOAD):
        assert report["torch"]["reason"] == answer["cause"]
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0, which leaves out torch_npu" in report["torch"]["hint"]
        assert not report["ok"]
    else:
        assert report["chosen"]["device"] == "cpu", "the other devices are there"
        assert report["ok"], "a device that is merely absent is no finding"
