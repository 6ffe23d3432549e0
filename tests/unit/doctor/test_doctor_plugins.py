"""``xamp doctor`` among packages of third parties that crash, hang, clash and lie: it reports each, the others work.

Covers: xamp.doctor.machine, xamp.doctor.children, xamp.registry.plugins.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from site_packages import HANGS, INSTALLED, LIMIT, best_of, distribution, doctor_finds, row_of

from xamp.cli._doctor_text import render, report

REPAIR = "report it to whoever ships the backend"
HEAD = "from xamp.contract import Backend, BackendSpec, Capabilities, Cause, Setting\n"


def plugin(name: str, body: str = "pass", kind: str = "cpu", more: str = "", **fields: Any) -> str:
    """A module with a spec and a backend whose class has ``body``."""
    given = "".join(f", {field}={value!r}" for field, value in fields.items())
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    target = f"p_{name.replace('-', '_')}:Plugged"
    spec = f"SPEC = BackendSpec({name!r}, ({kind!r},), {target!r}{given})"
    return f"{HEAD}{more}\n{spec}\nclass Plugged(Backend):\n{lines}\n"


def declaring(**fields: Any) -> str:
    given = ", ".join(f"{field}={value!r}" for field, value in fields.items())
    return f"def capabilities(self, device=None):\n    return Capabilities({given})"


# What each entry point's module does. Those up to "late" break while they are loaded.
MODULES = {
    "raises": "raise OSError('libacme.so: not found')",
    "quits": "import sys; sys.exit('licence expired')",
    "leaves": "import os; print('no licence', flush=True); os._exit(9)",
    "crashes": "import ctypes\ndef read_null():\n    ctypes.string_at(0)\nread_null()",
    "hangs": f"import time; {HANGS}\nwhile True:\n    time.sleep(1)",
    "floods": f"import time\nfor _ in range(4_000):\n    print('x' * 10_000)\n{HANGS}\ntime.sleep(1e6)",
    "interrupts": "raise KeyboardInterrupt",
    "late": plugin(
        "late",
        "def probe(self):\n    import os, signal\n    print('card 7 is dead', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)",
        more="CAUSES = (Cause(r'card (\\d) is dead', r'card \\1 does not answer', r'pull card \\1 out', ('crash',)),)",
        causes="p_late:CAUSES",
        priority=-20,
    ),
    "waits": plugin("waits", f"def probe(self):\n    import time; {HANGS}\n    time.sleep(1e6)", priority=-21),
    "tried": plugin("tried", "def unscale_(self, *arguments):\n    import os\n    os._exit(3)", priority=-22),
    "unforeseen": plugin("unforeseen", "def probe(self):\n    return 1 // 0", priority=-8),
    "absent": plugin(
        "absent",
        "def probe(self):\n    import xamp_no_such_framework",
        install_hint="pip install the-framework",
        priority=-9,
    ),
    "slow": "import time\ntime.sleep(2.2)\n" + plugin("slow", priority=-10),
    "chatty": "print('x' * 2_000_000)\n" + plugin("chatty", priority=-11),
    "clash": plugin("cuda", priority=500).replace("p_cuda", "p_clash"),
    "liar": plugin(
        "liar",
        declaring(
            levels=("O0", "O1", "O4", "O9"),
            dtypes=("float16", "int8", "float1"),
            fast_dtypes=("bfloat16",),
            fused_optimizers=("Adam", "LBFGS", "Nope"),
            process_group="warp",
            op_policies=("native", "magic"),
        )
        + "\ndef unscale_(self, grads, found_inf, inv_scale):\n    pass",
        priority=-12,
    ),
    "good": plugin("good", "def devices(self):\n    return ('Good 1',)", priority=-13),
}
BROKEN_ON_LOADING = ["raises", "quits", "leaves", "crashes", "hangs", "floods", "interrupts"]


def site(folder: Path, *names: str) -> Path:
    for name in names:
        distribution(folder, f"dist-{name}", f"{name} = p_{name}:SPEC", **{f"p_{name}": MODULES[name]})
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them in one environment."""
    folder = site(tmp_path_factory.mktemp("site"), *MODULES)
    return doctor_finds(folder=folder, code=1)


def of(found: dict[str, Any], name: str, registered_as: str = "") -> dict[str, Any]:
    return row_of(found, registered_as or name, f"dist-{name} 1.5")


def timeless(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings of a row but for how long it took, which a busy machine decides."""
    return [each for each in row["findings"] if not re.search(r" takes [\d.]+ s to (load|start)", each["text"])]


# --- entry points that cannot be loaded


@pytest.mark.parametrize(
    ("name", "reason", "printed"),
    [
        ("raises", "failed: OSError: libacme.so: not found", ""),
        ("quits", "failed: SystemExit: licence expired", ""),
        ("leaves", "ends its process with exit code 9", "no licence"),
        ("crashes", "ends its process by SIGSEGV (segmentation fault)", "line 3 in read_null"),
        ("hangs", f"does not finish within {LIMIT} s", 'p_hangs.py", line 3 in <module>'),
        ("floods", f"does not finish within {LIMIT} s, and prints ", "xxx"),
        ("interrupts", "ends its process ", "KeyboardInterrupt"),
    ],
)
def test_an_entry_point_that_breaks_is_reported_with_its_last_words(
    found: dict[str, Any], name: str, reason: str, printed: str
) -> None:
    row = of(found, name)
    assert (row["usable"], row["broken"], row["device_types"]) == (False, True, [])
    assert row["reason"].startswith(f"its entry point 'p_{name}:SPEC' {reason}")
    assert row["hint"].startswith(f"repair or uninstall dist-{name} 1.5")
    assert printed in "\n".join(row["printed"])
    assert len(row["printed"]) <= 6
    text = render(found)
    assert f"  {name:<10}  broken      for ?; from dist-{name} 1.5\n" in text
    assert f"\n  found     {name} (from dist-{name} 1.5): its entry point 'p_{name}:SPEC' {reason.split()[0]}" in text


def test_a_flood_is_measured(found: dict[str, Any]) -> None:
    assert float(of(found, "floods")["reason"].split()[-2].replace(",", "")) > 20
    assert not any(len(line) > 120 for line in of(found, "floods")["printed"])


# --- backends that end their process later


def test_a_backend_whose_start_crashes_is_told_in_the_words_of_its_table(found: dict[str, Any]) -> None:
    row = of(found, "late")
    assert (row["usable"], row["broken"], row["device_types"], row["priority"]) == (False, True, ["cpu"], -20)
    assert (row["reason"], row["hint"]) == ("card 7 does not answer", "pull card 7 out")
    assert row["detail"] == "using it ends its process by SIGSEGV (segmentation fault)"
    assert row["printed"][0] == "card 7 is dead"
    assert "p_late.py" in "\n".join(row["printed"])


def test_a_backend_whose_start_hangs_is_reported(found: dict[str, Any]) -> None:
    row = of(found, "waits")
    assert (row["usable"], row["reason"]) == (False, f"using it does not finish within {LIMIT} s")
    assert row["hint"] == "update the driver of its device, or uninstall dist-waits 1.5"


def test_a_backend_that_crashes_on_what_it_declares_stays_usable_with_a_defect(found: dict[str, Any]) -> None:
    row = of(found, "tried")
    assert row["usable"] is True
    assert timeless(row) == [
        {"severity": "defect", "text": "trying what it declares ends its process with exit code 3", "cure": REPAIR}
    ]


def test_an_error_that_nobody_foresaw_is_broken_and_a_missing_framework_is_not(found: dict[str, Any]) -> None:
    assert of(found, "unforeseen")["broken"] is True
    assert of(found, "unforeseen")["reason"].startswith("ZeroDivisionError: ")
    assert of(found, "unforeseen")["hint"]
    absent = of(found, "absent")
    assert (absent["usable"], absent["broken"]) == (False, False)
    assert absent["hint"] == "pip install the-framework"


# --- the slow, the loud, the namesake, the liar


def test_a_slow_entry_point_works_and_says_how_slow(found: dict[str, Any]) -> None:
    row = of(found, "slow")
    finding = row["findings"][0]
    assert (row["usable"], finding["severity"]) == (True, "warning")
    told = r"its entry point takes ([\d.]+) s to load, and everything that asks xamp for a backend waits for it"
    assert float(re.match(told, finding["text"])[1]) >= 2.2  # type: ignore[index]


def test_a_loud_one_works_and_says_how_loud(found: dict[str, Any]) -> None:
    row = of(found, "chatty")
    assert row["usable"] is True
    assert [(each["severity"], each["text"]) for each in timeless(row)] == [
        ("warning", "it prints 2.0 MB while it starts")
    ]


def test_one_that_clashes_in_name_takes_nothing(found: dict[str, Any]) -> None:
    row = of(found, "clash", "cuda")
    assert (row["usable"], row["broken"], row["reason"]) == (False, True, "the name 'cuda' is already taken by xamp")
    assert row["hint"] == "uninstall one of the two, or have dist-clash 1.5 choose another name"
    assert row_of(found, "cuda")["broken"] is False


@pytest.mark.parametrize(
    "lie",
    [
        "declares level 'O4', but not bfloat16, which it computes in",
        "declares level 'O9', but there is no such level; there are O0, O1, O2, O3, O4, O5",
        "declares fast_dtypes=('bfloat16',), but bfloat16 is not among its dtypes=",
        "declares dtype 'int8', but torch has no floating-point dtype of that name",
        "declares dtype 'float1', but torch has no floating-point dtype of that name",
        "declares fused optimizer 'LBFGS', but its step fails: TypeError: ",
        "declares fused optimizer 'Nope', but torch.optim has none of that name",
        "declares overflow='inf', but unscale_ does not multiply the gradient by inv_scale",
        "declares overflow='inf', but unscale_ overlooks an overflow",
        "declares process_group 'warp', but torch.distributed knows none of that name; it knows gloo, ",
        "declares op_policy 'magic', but there is no such op policy; there are ",
    ],
)
def test_each_lie_is_a_finding(found: dict[str, Any], lie: str) -> None:
    row = of(found, "liar")
    assert row["usable"] is True
    (finding,) = [finding for finding in row["findings"] if finding["text"].startswith(lie)]
    assert finding["severity"] == "defect"
    assert finding["cure"].startswith("the backend's capabilities() must declare what the device does")
    assert len(timeless(row)) == 11


# --- the others


def test_the_others_work(found: dict[str, Any]) -> None:
    good, cpu = of(found, "good"), row_of(found, "cpu")
    assert (good["usable"], good["devices"], timeless(good)) == (True, ["Good 1"], [])
    assert (cpu["usable"], timeless(cpu)) == (True, [])
    assert found["torch"]["version"]
    assert (found["ok"], found["chosen"]["reason"]) == (False, "")
    assert found["recommended"]["level"].startswith("O")


def test_every_entry_point_has_one_row_in_order(found: dict[str, Any]) -> None:
    sources = [row["source"] for row in found["backends"] if row["source"] != "xamp" and row["name"] not in INSTALLED]
    assert sorted(sources) == sorted(f"dist-{name} 1.5" for name in MODULES)
    priorities = [(-row["priority"], row["name"]) for row in found["backends"]]
    assert priorities == sorted(priorities)


def test_everything_dead_has_a_cause_and_a_cure_in_text_and_report(found: dict[str, Any]) -> None:
    block = report(found)
    for row in found["backends"]:
        if not row["usable"]:
            assert row["reason"], row
            assert row["hint"], row
            assert row["reason"] in block.replace("<python>", "")


# --- what is left where one environment is not enough


def test_two_that_only_break_together_are_reported_and_the_choice_is_made_without_them(tmp_path: Path) -> None:
    second = "import os, sys\nif 'p_one' in sys.modules:\n    os._exit(5)\n" + plugin("two", priority=-2)
    distribution(tmp_path, "dist-one", "one = p_one:SPEC", p_one=plugin("one", priority=-1))
    distribution(tmp_path, "dist-two", "two = p_two:SPEC", p_two=second)
    found = doctor_finds(folder=tmp_path, code=1)
    assert of(found, "one")["usable"] is True
    reason = of(found, "two")["reason"]
    assert reason.startswith("its entry point 'p_two:SPEC' works by itself, but together with one (dist-one 1.5)")
    assert reason.endswith(" it ends its process with exit code 5")
    assert found["chosen"]["device"] == best_of(found)


ACCELERATOR = """
def devices(self):
    return ("Meta 1",)
def unscale_(self, grads, found_inf, inv_scale):
    pass
def precision_settings(self, device):
    return [Setting("ACME_FAST", "1", "products are rough", "unset ACME_FAST"),
            Setting("ACME_MODE", "2", "products are smooth", "unset ACME_MODE", expected=True)]
"""


def test_an_accelerator_is_chosen_with_level_shapes_settings_and_masks(tmp_path: Path) -> None:
    """torch's meta device stands for one: it has no numbers, so what is declared of its arithmetic is found untrue."""
    body = ACCELERATOR + declaring(levels=("O0", "O1", "O2"), dtypes=("float16",), fast_dtypes=("float16",))
    text = plugin("acme", body, "meta", priority=200, masks=("ACME_VISIBLE_DEVICES",), causes="p_acme:MISSING")
    distribution(tmp_path, "dist-acme", "acme = p_acme:SPEC", p_acme=text)
    found = doctor_finds(folder=tmp_path, code=1, ACME_VISIBLE_DEVICES="3")
    row, recommended = of(found, "acme"), found["recommended"]
    assert found["chosen"] == {"device": "meta", "backend": "acme", "reason": ""}
    assert (recommended["level"], [level for level, _ in recommended["alternatives"]]) == ("O1", ["O2"])
    assert "float16 is native to this device and bfloat16 is not" in recommended["reason"]
    assert "multiples of 8: matrix units take tiles of 8 values of float16" in recommended["shapes"]
    assert "  shapes    at O1 give linear layers" in render(found)
    assert [(each["name"], each["severity"]) for each in row["settings"]] == [
        ("ACME_FAST", "warning"),
        ("ACME_MODE", "note"),
    ]
    findings = {finding["text"]: finding["severity"] for finding in row["findings"]}
    assert findings["devices may be hidden by ACME_VISIBLE_DEVICES='3'"] == "note"
    assert "defect" in [severity for text, severity in findings.items() if "declares dtype 'float16', but" in text]
    assert any(text.startswith("its table of causes 'p_acme:MISSING' cannot be read") for text in findings)
    assert found["environment"] == {"ACME_VISIBLE_DEVICES": "3"}
