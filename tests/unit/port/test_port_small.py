"""What a port says and leaves where nothing is to be said: guards of imports, choices, escapes, texts for people.

Covers: xamp.port.rules.guards, xamp.port.rules.builds, xamp.port.other.port.
"""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.other.kinds import Kind
from xamp.port.other.port import port_lines
from xamp.port.rule import Grade

GUARDS = {
    "a version": ("if torch.__version__ >= '1.8':\n    import torch_npu\ny = 1\n", "y = 1\n"),
    "a version that is read": (
        "if LooseVersion(torch.__version__) >= LooseVersion('1.8'):\n    import torch_npu  # the card\ny = 1\n",
        "y = 1\n",
    ),
    "two of them": ("if a:\n    if b.c:\n        import torch_npu\ny = 1\n", "y = 1\n"),
    "a try": ("try:\n    import torch_npu\nexcept ImportError:\n    print('none')\ny = 1\n", "y = 1\n"),
    "a try in an if": (
        "if a:\n    try:\n        import torch_npu\n    except Exception:\n        pass\ny = 1\n",
        "y = 1\n",
    ),
    "in a function": (
        "def f():\n    if a:\n        import torch_npu\n    return 1\n",
        "def f():\n    return 1\n",
    ),
    "alone in a function": ("def f():\n    if a:\n        import torch_npu\n", "def f():\n    pass\n"),
    "alone in a function, bare": ("def f():\n    import torch_npu\n", "def f():\n    pass\n"),
    "an else": ("if a:\n    import torch_npu\nelse:\n    b()\n", "if a:\n    pass\nelse:\n    b()\n"),
    "an elif": ("if a:\n    b()\nelif c:\n    import torch_npu\n", "if a:\n    b()\nelif c:\n    pass\n"),
    "a call": ("if f():\n    import torch_npu\n", "if f():\n    pass\n"),
    "more": ("if a:\n    import torch_npu\n    b()\n", "if a:\n    b()\n"),
    "a try with an end": (
        "try:\n    import torch_npu\nfinally:\n    c = 2\n",
        "try:\n    pass\nfinally:\n    c = 2\n",
    ),
    "a handler": (
        "try:\n    a()\nexcept ImportError:\n    import torch_npu\n",
        "try:\n    a()\nexcept ImportError:\n    pass\n",
    ),
    "one line": ("if a: import torch_npu\n", "if a: pass\n"),
    "two on a line": ("if a:\n    import torch_npu; b()\n", "if a:\n    pass; b()\n"),
    "a loop": ("for a in b:\n    import torch_npu\n", "for a in b:\n    pass\n"),
}


@pytest.mark.parametrize(("before", "after"), GUARDS.values(), ids=GUARDS)
def test_a_guard_goes_with_what_it_guards(before: str, after: str) -> None:
    for newline in ("\n", "\r\n"):
        text = f"import torch\n{before}".replace("\n", newline)
        assert port_text(text).text == f"import torch\n{after}".replace("\n", newline)


def test_no_warning_comes_of_the_script_s_own_escapes() -> None:
    text = "import re\nx = y.cuda()\nre.sub('\\d', 'cuda' '\\d', z)\n1 is 1\n"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "y.to(xamp.device())" in port_text(text).text
    assert caught == []


def test_choices_that_have_both_backends_need_none() -> None:
    both = "p.add_argument('--backend', choices=['nccl', 'gloo', \"hccl\"])\n"
    assert port_text(both).findings == ()
    for one in ("['nccl', 'gloo']", "['hccl']", "['nccl', 'not hccl']"):
        told = port_text(f"p.add_argument('--backend', choices={one})\n").findings
        assert [each.grade for each in told] == [Grade.NOTED], one


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from torch._C import default_generator\n", False),
        ("import torch._C as c\n", False),
        ("from torch import _C\n", False),
        ("import torchvision._C\n", False),
        ("import mine._C\n", True),
        ("from mine import _C\n", True),
        ("from . import _C\n", True),
        ("from .torch import _C\n", True),
        ("from torch_scatter_cuda import scatter\n", True),
    ],
)
def test_a_part_of_torch_is_no_extension_for_cuda(text: str, told: bool) -> None:
    found = port_text(f"{text}x.cuda()\n").findings
    assert any(each.rule == "cuda-builds" for each in found) is told


def test_a_test_that_imports_a_part_of_torch_guards_no_build() -> None:
    text = "import torch\nif torch.cuda.is_available():\n    {}\n"
    assert "if xamp.is_available():" in port_text(text.format("from torch._C import a")).text
    assert "if xamp.is_available():" in port_text(text.format("import torch._C")).text
    assert "if torch.cuda.is_available():" in port_text(text.format("from mine._C import a")).text


def test_a_question_as_the_first_of_an_elif_guards_no_build() -> None:
    text = (
        "import torch\ndef f(a):\n    if a:\n        pass\n    elif not torch.cuda.is_available():\n        raise E\n"
        "    import numba.cuda\n"
    )
    assert "elif not xamp.is_available():" in port_text(text).text


def test_a_word_in_a_chinese_text_is_told_of() -> None:
    for kind in (Kind.TEXT, Kind.SHELL, Kind.YAML):
        ported = port_lines(kind, "# 是否使用apex混合精度训练\n")
        assert [each.excerpt for each in ported.stays] == ["# 是否使用apex混合精度训练"]


SHOWN = {
    "to the terminal": ("cat <<EOT && exit 1\nnvcc is missing\nEOT\n", [Grade.NEUTRAL]),
    "to the terminal's other end": ("if a; then cat >&2 <<-'EOT'\n\tnvcc is missing\n\tEOT\nfi\n", [Grade.NEUTRAL]),
    "into a file": ("cat > build.sh <<EOT\nnvcc a.cu\nEOT\n", [Grade.NOTED]),
    "into a program": ("cat <<EOT | sh\nnvcc a.cu\nEOT\n", [Grade.NOTED]),
    "for a shell": ("bash <<EOT\nnvcc a.cu\nEOT\n", [Grade.NOTED]),
    "below it": ("cat <<EOT\nhello\nEOT\nnvcc a.cu\n", [Grade.NOTED]),
    "no here document": ("cat a.txt\nnvcc a.cu\n", [Grade.NOTED]),
    "a here string": ("cat <<<EOT\nnvcc a.cu\n", [Grade.NOTED]),
    "or else": ("cat <<EOT || exit 1\nnvcc is missing\nEOT\n", [Grade.NEUTRAL]),
}


@pytest.mark.parametrize(("text", "grades"), SHOWN.values(), ids=SHOWN)
def test_what_a_shell_script_prints_is_for_people(text: str, grades: list[Grade]) -> None:
    ported = port_lines(Kind.SHELL, text)
    assert [each.grade for each in (*ported.findings, *ported.stays) if "nvcc" in each.excerpt] == grades
    assert not ported.changed
