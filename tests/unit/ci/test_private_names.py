"""ci/private_names.py: what counts as a private name of torch, where one may stand, and that the table has each."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from ci_scripts import ROOT, script
from gathering import cases

private_names = script("private_names")


def test_only_adapters_name_one() -> None:
    assert private_names.misplaced(private_names.users(ROOT)) == []


def test_the_table_and_the_adapters_agree() -> None:
    assert private_names.disagreements(private_names.taken(ROOT), private_names.table()) == []


def test_the_count_stands_in_the_page() -> None:
    assert private_names.count(private_names.users(ROOT)) in (ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_what_is_exempt_exists() -> None:
    places = (*private_names.ADAPTERS, *private_names.OF_SCRIPTS, private_names.TABLE)
    assert [each for each in places if not (ROOT / each).exists()] == []


# --- the rule

FOUND = {
    "import torch\ntorch._C.x()": ["torch._C.x"],
    "import torch\ntorch.a._b.c.d": ["torch.a._b.c.d"],
    "import torch._x": ["torch._x"],
    "import torch._C as c\nc.x": ["torch._C", "torch._C.x"],
    "from torch import _C\n_C.x": ["torch._C", "torch._C.x"],
    "from torch import nn\nnn.y._Z": ["torch.nn.y._Z"],
    "from torch.y import _z as w\nw()": ["torch.y._z"],
    "from torch._y import z": ["torch._y.z"],
    "import torch\na: object = torch.ops.aten\nb = a\nb._to": ["torch.ops.aten._to"],
    "import torch\na, b = torch.nn, torch.x\nb._c": ["torch.x._c"],
    "import torch\nclass A(torch._B):\n    x: torch._D": ["torch._B", "torch._D"],
    'import torch\nhasattr(torch.a, "_b")': ["torch.a._b"],
    'import torch as t\ngetattr(t._C, "x", t._d)': ["torch._C.x", "torch._d"],
    'import sys\nsys.modules["torch.a"]._b': ["torch.a._b"],
    'names = ["torch._dynamo.x", "torch.a:_B"]': ["torch._dynamo.x", "torch.a._B"],
    "import torch\ntorch._B.__name__": ["torch._B"],
}


def test_a_name_is_found() -> None:
    with cases() as case:
        for source, wanted in FOUND.items():
            with case(source):
                assert [name for _, name in private_names.names(source)] == wanted


NOT_FOUND = [
    "import torch\ntorch.nn.Module()",
    "import torch\ntorch.__version__",
    "import torch\ntorch.ops.npu._x\ntorch.npu._y",
    'import torch\nhasattr(torch.nn.Module, "_xamp_mark")',
    "import mine\nmine._x",
    "import torch\nt = torch.a\ndef f(t):\n    t._x",
    'text = "see torch._x"',
    "import torch\nx = torch.ones(1)\nx._version",
]


def test_another_name_is_not() -> None:
    assert {source: found for source in NOT_FOUND if (found := private_names.names(source))} == {}


# --- where one may stand, and the table


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package with an adapter of three names, and a module that uses two of them."""
    files = {
        "xamp/torch_compat/torch_private/one.py": """
            import torch
            from torch._y import first, second
            third = torch._z
            def call():
                return second(third)
            """,
        "xamp/scaling/user.py": """
            from xamp.torch_compat.torch_private import one
            from xamp.torch_compat.torch_private.one import first
            one.call()
            """,
        "backends/npu/emulation/user.py": "from xamp.torch_compat.torch_private.one import first",
        "xamp/casting/wrong.py": "import torch\n\ntorch._w",
    }
    for inside, text in files.items():
        (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / inside).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def test_a_name_out_of_place_is_told(tree: Path) -> None:
    (line,) = private_names.misplaced(private_names.users(tree))
    assert line.startswith("xamp/casting/wrong.py:3: torch._w is private to torch")
    core = f"{len(private_names.core_names())} of them in the core"
    assert private_names.count(private_names.users(tree)) == f"4 private names of torch in 2 modules, {core}"


def test_the_core_may_have_so_many(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert private_names.MOST == 50
    assert private_names.main([]) == 0
    monkeypatch.setattr(private_names, "MOST", len(private_names.core_names()) - 1)
    assert private_names.main([]) == 1
    assert "take one out" in capsys.readouterr().out


def test_users_are_found_through_what_adapters_bind(tree: Path) -> None:
    assert private_names.taken(tree) == {
        "torch._y.first": {"emulation", "scaling"},
        "torch._y.second": {"scaling"},
        "torch._z": {"scaling"},
    }


TABLE = {"torch._y.first": ("emulation", "scaling"), "torch._y.second": ("scaling",), "torch._z": ("scaling",)}
WRONG = {
    "has it, and xamp/torch_compat/torch_private/names.py no line": {k: v for k, v in TABLE.items() if k != "torch._z"},
    "has a line for it, and no adapter has it": {**TABLE, "torch._gone": ("scaling",)},
    "says casting use it; scaling do": {**TABLE, "torch._z": ("casting",)},
}


@pytest.mark.parametrize("told", WRONG)
def test_a_table_that_differs_is_told(told: str, tree: Path) -> None:
    found = private_names.taken(tree)
    assert private_names.disagreements(found, TABLE) == []
    (line,) = private_names.disagreements(found, WRONG[told])
    assert told in line


def test_a_name_that_nothing_uses_is_told(tree: Path) -> None:
    (tree / "xamp" / "scaling" / "user.py").write_text("", encoding="utf-8")
    lines = private_names.disagreements(private_names.taken(tree), {**TABLE, "torch._y.first": ("emulation",)})
    assert lines == [f"{name}: an adapter has it, and nothing uses it" for name in ("torch._y.second", "torch._z")]
