"""Modes of the command, and files that are not what they should be.

Covers: xamp.cli.port, xamp.port.files, xamp.port.find, xamp.port.settings, xamp.port.report.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.cli import main
from xamp.errors import StateError
from xamp.port import files
from xamp.port.rule import Rule

BEFORE = "import torch\nx = torch.zeros(3).cuda()\n"
AFTER = "import torch\nimport xamp\nx = torch.zeros(3).to(xamp.device())\n"
UNSUPPORTED = "import torch\ntorch.cuda.cudart()\n"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(BEFORE, encoding="utf-8")
    return path


def git(folder: Path, *words: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *words], cwd=folder, check=True, capture_output=True)


def test_a_diff_is_the_default(script: Path, capsys: Output) -> None:
    assert main(["port", "train.py"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,3 @@\n import torch\n-x = torch.zeros(3).cuda()\n"
        "+import xamp\n+x = torch.zeros(3).to(xamp.device())\n"
    )
    assert script.read_text() == BEFORE


def test_write_keeps_the_mode_and_writes_once(script: Path) -> None:
    script.chmod(0o754)
    assert main(["port", "--write", "train.py"]) == 0
    assert script.read_text() == AFTER
    assert stat.S_IMODE(script.stat().st_mode) == 0o754
    assert main(["port", "--check", "train.py"]) == 0
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_check_fails_where_something_is_to_port(script: Path, capsys: Output) -> None:
    assert main(["port", "--check", "train.py"]) == 1
    assert "would port train.py" in capsys.readouterr().out
    script.write_text(UNSUPPORTED)
    assert main(["port", "train.py"]) == 1
    error = capsys.readouterr().err
    assert "train.py:2: unsupported: the CUDA runtime is CUDA's only" in error
    assert "    torch.cuda.cudart()\n    ^^^^^^^^^^^^^^^^^" in error


def test_what_git_does_not_have_is_not_written_over(script: Path, capsys: Output) -> None:
    git(script.parent, "init", "-q")
    assert main(["port", "--write", "train.py"]) == 2
    assert "--write: train.py would be rewritten and git does not have the present state" in capsys.readouterr().err
    assert script.read_text() == BEFORE
    git(script.parent, "add", "train.py")
    git(script.parent, "commit", "-qm", "x")
    assert main(["port", "--write", "train.py"]) == 0
    script.write_text(BEFORE)
    assert main(["port", "--write", "--force", "train.py"]) == 0
    assert script.read_text() == AFTER


def test_a_file_that_changed_meanwhile_is_left(script: Path) -> None:
    outcome = files.port_file("train.py")
    script.write_text(BEFORE + "y = 1\n")
    with pytest.raises(StateError, match="has changed while it was being ported; it is left as it is"):
        files.write(outcome)
    assert script.read_text() == BEFORE + "y = 1\n"


def test_a_link_stays_a_link(script: Path) -> None:
    os.symlink("train.py", script.parent / "link.py")
    assert main(["port", "--write", "link.py"]) == 0
    assert (script.parent / "link.py").is_symlink()
    assert script.read_text() == AFTER


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (codecs.BOM_UTF8 + BEFORE.encode(), codecs.BOM_UTF8 + AFTER.encode()),
        (BEFORE.replace("\n", "\r\n").encode(), AFTER.replace("\n", "\r\n").encode()),
        (BEFORE.rstrip("\n").encode(), AFTER.rstrip("\n").encode()),
        (
            b"# coding: gbk\n# \xc4\xe3\xba\xc3\n" + BEFORE.encode(),
            b"# coding: gbk\n# \xc4\xe3\xba\xc3\n" + AFTER.encode(),
        ),
        (
            b"# -*- coding: latin-1 -*-\n# \xe9\n" + BEFORE.encode(),
            b"# -*- coding: latin-1 -*-\n# \xe9\n" + AFTER.encode(),
        ),
        (b"\x0c\n" + BEFORE.encode(), b"\x0c\n" + AFTER.encode()),
        (
            (BEFORE + "if x:\n\ty = x.cuda() \t # a\n").encode(),
            (AFTER + "if x:\n\ty = x.to(xamp.device()) \t # a\n").encode(),
        ),
    ],
    ids=["bom", "crlf", "no final newline", "gbk", "latin-1", "form feed", "tabs"],
)
def test_bytes_that_are_not_edited_stay(script: Path, data: bytes, wanted: bytes) -> None:
    script.write_bytes(data)
    assert main(["port", "--write", "train.py"]) == 0
    assert script.read_bytes() == wanted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"import torch\nprint 'cuda'\n", "it looks like Python 2. Convert it first"),
        (b"x = x.cuda(async=True)\n", "it looks like Python 2. Convert it first"),
        (b"x = x.cuda()\nif x\n    y = 1\n", "line 3: no Python 3 that can be read: expected"),
        (b"# \xff\xfe cuda\n", "missing encoding declaration. Declare the right one in the first line"),
        (b"# coding: klingon\nx.cuda()\n", "unknown encoding: klingon"),
        ("x.cuda()".encode("utf-16"), "the file has null bytes"),
        (b"x.cuda(" + b"(" * 5000 + b")" * 5001, "nested too deeply"),
        (b"x = y.cuda()" + b"+ 1" * 40000, "nested too deeply"),
    ],
    ids=["print", "async", "syntax", "bytes", "coding", "utf-16", "brackets", "sum"],
)
def test_what_cannot_be_read_is_told(script: Path, capsys: Output, data: bytes, message: str) -> None:
    script.write_bytes(data)
    assert main(["port", "--write", "train.py"]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.endswith("1 file: 0 ported, 1 not readable.\n")
    assert script.read_bytes() == data


def test_loops_of_links_and_odd_names_end(script: Path, capsys: Output) -> None:
    top = script.parent
    os.symlink(".", top / "loop")
    os.symlink("nowhere.py", top / "broken.py")
    os.mkfifo(top / "pipe.py")
    odd = ["new\nline.py", "-write.py", " .py", os.fsdecode(b"\xff.py"), "\u202eyp.py", "[a].py"]
    for name in odd:
        (top / name).write_text(BEFORE)
    (top / "__pycache__").mkdir()
    (top / "__pycache__" / "cached.py").write_text(BEFORE)
    assert main(["port", ".", "--report", "out.json", "--write"]) == 0
    assert "7 files: 7 ported, 0 not readable." in capsys.readouterr().err
    assert all((top / name).read_text() == AFTER for name in odd)
    assert len(json.loads((top / "out.json").read_text())["files"]) == 7
    assert main(["port", "nowhere.py"]) == 2
    assert main(["port", "broken.py"]) == 2
    assert "a link that leads nowhere" in capsys.readouterr().err
    assert main(["port", "pipe.py"]) == 1
    assert "pipe.py: is no regular file" in capsys.readouterr().err


def test_patterns_choose_files(script: Path, capsys: Output) -> None:
    for name in ("a/x.py", "a/b/y.py", "tests/z.py"):
        path = script.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BEFORE)
    assert main(["port", ".", "--check", "--exclude", "tests", "--exclude", "a/b"]) == 1
    assert capsys.readouterr().out.splitlines() == ["would port ./a/x.py", "would port ./train.py"]
    assert main(["port", ".", "--check", "--include", "y.py"]) == 1
    assert capsys.readouterr().out.splitlines() == ["would port ./a/b/y.py"]
    (script.parent / "pyproject.toml").write_text('[tool.xamp.port]\nexclude = ["a", "tests"]\njobs = 1\n')
    assert main(["port", ".", "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == ["would port ./train.py"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("excluded = []", "has no 'excluded'; there are exclude, include, jobs"),
        ("exclude = 'a'", "exclude = 'a' must be a list of texts"),
        ("jobs = -1", "jobs = -1 must be a number from 0"),
        ("jobs = ", "no TOML"),
    ],
)
def test_wrong_settings_are_told(script: Path, capsys: Output, table: str, message: str) -> None:
    (script.parent / "pyproject.toml").write_text(f"[tool.xamp.port]\n{table}\n")
    assert main(["port", "train.py"]) == 2
    assert message in capsys.readouterr().err


def test_many_files_are_ported_in_processes(script: Path, capsys: Output) -> None:
    for number in range(20):
        (script.parent / f"m{number:02}.py").write_text(BEFORE)
    assert main(["port", ".", "--check", "--jobs", "2"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 21


def test_reports_say_the_place(script: Path) -> None:
    script.write_text(BEFORE + "torch.cuda.cudart()\n")
    assert main(["port", "train.py", "--report", "out.json"]) == 1
    (file,) = json.loads(Path("out.json").read_text())["files"]
    found = {row["rule"]: row for row in file["findings"] if row["grade"] != "neutral"}
    assert file["counts"] == {"certain": 1, "neutral": 0, "noted": 0, "unsupported": 1}
    assert (found["device-method"]["line"], found["device-method"]["column"]) == (2, 5)
    assert found["torch-cuda"]["excerpt"].splitlines()[1] == "    ^^^^^^^^^^^^^^^^^"
    assert main(["port", "train.py", "--report", "out.sarif"]) == 1
    run: dict[str, Any] = json.loads(Path("out.sarif").read_text())["runs"][0]
    assert {result["level"] for result in run["results"]} == {"note", "error"}
    region = run["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 2, "startColumn": 5, "endColumn": 26}
    assert main(["port", "train.py", "--report", "out.html"]) == 1
    page = Path("out.html").read_text()
    assert '<span class="del">-x = torch.zeros(3).cuda()</span>' in page
    assert "the CUDA runtime is CUDA&#x27;s only" in page
    assert main(["port", "train.py", "--report", "out.txt"]) == 2


def test_a_notebook_is_ported_as_one_file(script: Path) -> None:
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "metadata": {}, "source": ["x.cuda()"]},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [{"text": "cuda"}],
            "source": ["%matplotlib inline\n", "import torch"],
        },
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": "%%bash\nnvidia-smi # cuda"},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "source": ["for i in x:\n", "    !echo {i}\n", "torch.cuda.empty_cache()"],
        },
    ]
    book = {"cells": cells, "metadata": {"é": 1}, "nbformat": 4, "nbformat_minor": 5}
    path = script.parent / "a.ipynb"
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    before = path.read_text(encoding="utf-8").splitlines()
    assert main(["port", "--write", "a.ipynb"]) == 0
    after = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in after if line not in before] == [
        '    "import torch\\n",',
        '    "import xamp"',
        '    "xamp.accel.empty_cache()"',
    ]
    assert json.loads("\n".join(after))["cells"][3]["source"] == [
        "for i in x:\n",
        "    !echo {i}\n",
        "xamp.accel.empty_cache()",
    ]
    path.write_text("{}")
    assert main(["port", "a.ipynb"]) == 1


def notebook(path: Path, *cells: str) -> None:
    book = {
        "cells": [{"cell_type": "code", "metadata": {}, "outputs": [], "source": cell} for cell in cells],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path.write_text(json.dumps(book), encoding="utf-8")


def cells_of(path: Path) -> list[str]:
    return [cell["source"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


@pytest.mark.parametrize(
    "line",
    [
        *(
            "%matplotlib inline",
            "files = !ls -l",
            "t = %timeit -o f()",
            "net?",
            "net.forward??",
            "?net",
            "!ls \\\n  -l",
        ),
        *("for i in x:\n    !echo {i}", "if x:\n\t%time f()", "%%time\nf()", "%%capture out"),
    ],
)
def test_lines_for_ipython_stay_in_any_place(script: Path, line: str) -> None:
    path = script.parent / "a.ipynb"
    notebook(path, "import torch, xamp", f"{line}\nx = y.cuda()")
    assert main(["port", "--write", "a.ipynb"]) == 0
    assert cells_of(path) == ["import torch, xamp", f"{line}\nx = y.to(xamp.device())"]


def test_texts_and_sums_of_a_cell_are_not_for_ipython(script: Path) -> None:
    path = script.parent / "a.ipynb"
    code = 's = """\n!ls\n%x\n"""\nn = (7\n  % 3)\nm = 7 \\\n  % 3\nx = y.cuda()'
    notebook(path, "import xamp", code)
    assert main(["port", "--write", "a.ipynb"]) == 0
    assert cells_of(path)[1] == code.replace("cuda()", "to(xamp.device())")


def test_a_cell_that_is_no_python_is_told_and_the_others_ported(script: Path, capsys: Output) -> None:
    path = script.parent / "a.ipynb"
    notebook(path, "import xamp\nx = y.cuda()", "x = = y.cuda()", "z = y.cuda()")
    assert main(["port", "--write", "a.ipynb"]) == 1
    assert cells_of(path) == ["import xamp\nx = y.to(xamp.device())", "x = = y.cuda()", "z = y.to(xamp.device())"]
    assert "code cell 2 stays as it is" in capsys.readouterr().err


def test_a_cell_is_counted_among_all_code_cells(script: Path, capsys: Output) -> None:
    notebook(script.parent / "a.ipynb", "import xamp", "%%bash\nls", "x = = y.cuda()", "z = y.cuda()")
    assert main(["port", "a.ipynb"]) == 1
    error = capsys.readouterr().err
    assert "code cell 3 stays as it is" in error
    assert "\n1 file: 1 to port" in error


def test_amp_is_added_to_a_notebook(script: Path) -> None:
    path = script.parent / "a.ipynb"
    notebook(path, "import torch\nopt = torch.optim.SGD(net.parameters(), 0.1)", "loss.backward()\nopt.step()")
    assert main(["port", "--write", "--add-amp", "O2", "a.ipynb"]) == 0
    assert cells_of(path) == [
        "import torch\nimport xamp\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
        'net, opt = xamp.initialize(net, opt, level="O2")',
        "with xamp.scale_loss(loss, opt) as scaled_loss:\n    scaled_loss.backward()\nopt.step()",
    ]


def test_what_is_left_out_is_left_out_where_a_hook_names_it(script: Path, capsys: Output) -> None:
    for name in ("tests/z.py", "a/tests.py"):
        path = script.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BEFORE)
    (script.parent / "pyproject.toml").write_text('[tool.xamp.port]\nexclude = ["tests", "a/*"]\njobs = 1\n')
    assert main(["port", "--check", "tests/z.py", "train.py", "a/tests.py", "tests"]) == 1
    assert capsys.readouterr().out.splitlines() == ["would port train.py"]
    assert main(["port", "--check", str(script.parent / "tests" / "z.py")]) == 0
    assert main(["port", "--check", "train.py", "--exclude", "train.py"]) == 0


def test_a_diff_has_the_lines_of_the_file(script: Path, capsys: Output) -> None:
    script.write_text("import xamp\n\f\nx = y.cuda()  # a\x0cb\u2028c\n", encoding="utf-8")
    assert main(["port", "train.py"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[2:] == [
        *("@@ -1,3 +1,3 @@", " import xamp", " \f", "-x = y.cuda()  # a\x0cb\u2028c"),
        *("+x = y.to(xamp.device())  # a\x0cb\u2028c", ""),
    ]


def test_a_name_that_another_file_takes_stays(script: Path, capsys: Output) -> None:
    text = "from apex import amp\namp.state_dict()\n"
    for name in ("tools", "other"):
        (script.parent / f"{name}.py").write_text(text)
    script.write_text("from tools import (\n    amp,\n)\nm, o = amp.initialize(m, o)\n")
    assert main(["port", "--write", "."]) == 0
    assert (script.parent / "tools.py").read_text() == "import xamp as amp\namp.state_dict()\n"
    assert (script.parent / "other.py").read_text() == "import xamp\nxamp.state_dict()\n"
    assert 'where tools.amp was Apex, say level="O1" here' in capsys.readouterr().err


@pytest.mark.parametrize("way", ["import tools as t", "import a.tools as t", "from a import tools as t, other"])
def test_a_name_that_another_file_takes_by_an_alias_stays(script: Path, way: str) -> None:
    (script.parent / "tools.py").write_text("from apex import amp\namp.state_dict()\n")
    script.write_text(f"{way}\nm, o = t.amp.initialize(m, o)\n")
    main(["port", "--write", "."])
    assert (script.parent / "tools.py").read_text() == "import xamp as amp\namp.state_dict()\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "if i: loss.backward()",
            "if i:\n        with xamp.scale_loss(loss, opt) as scaled_loss:\n            scaled_loss.backward()",
        ),
        (
            "loss.backward(); n = 1",
            "(loss, optimizer) around this: it is not a line of its own",
        ),
        ("r = loss.backward()", "(loss, optimizer) around this: it is not a line of its own"),
    ],
)
def test_amp_is_added_around_any_backward_or_it_is_told(script: Path, line: str, wanted: str) -> None:
    script.write_text(
        f"import torch\nopt = torch.optim.SGD(net.parameters(), 0.1)\nfor i in x:\n    {line}\n    opt.step()\n"
    )
    assert main(["port", "--write", "--add-amp", "O1", "train.py"]) == 0
    assert wanted in script.read_text()
    compile(script.read_text(), "train.py", "exec")


def test_amp_is_added_to_a_script_without(script: Path) -> None:
    script.write_text(
        "import torch\n\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in data:\n    loss = model(x).mean()\n    optimizer.zero_grad()\n    loss.backward()\n"
        "    optimizer.step()\n"
    )
    assert main(["port", "--write", "--add-amp", "O1", "train.py"]) == 0
    text = script.read_text()
    assert text == (
        "import torch\nimport xamp\n\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        'model, optimizer = xamp.initialize(model, optimizer, level="O1")\n'
        "for x in data:\n    loss = model(x).mean()\n    optimizer.zero_grad()\n"
        "    with xamp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward()\n"
        "    optimizer.step()\n"
    )
    assert main(["port", "--write", "--add-amp", "O1", "train.py"]) == 0
    assert script.read_text() == text
    assert main(["port", "--add-amp", "O9", "train.py"]) == 2


def test_a_rule_is_explained(capsys: Output) -> None:
    assert main(["port", "--explain", "device-method"]) == 0
    out = capsys.readouterr().out
    assert "- x = x.cuda()\n" in out
    assert "+ x = x.to(xamp.device())\n" in out
    assert main(["port", "--explain", "all"]) == 0
    assert capsys.readouterr().out.count("\n") > 15
    assert main(["port", "--explain", "device-metod"]) == 2
    assert "Did you mean 'device-method'?" in capsys.readouterr().err


class Shout(Rule):
    """Calls of `whisper` are shouted."""

    name = "shout"
    kinds = ("Call",)

    def look(self, node: Any, work: Any) -> None:
        if work.code(node.func) == "whisper":
            work.replace(node.func, "SHOUT")


class _Point:
    name, value = "shout", "somewhere:RULES"

    def __init__(self, rules: Any) -> None:
        self.rules = rules

    def load(self) -> Any:
        if isinstance(self.rules, Exception):
            raise self.rules
        return self.rules


def test_another_package_adds_rules(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    from xamp.port import engine, rules

    script.write_text("cuda = whisper(1)\n")
    for given, wanted in (([Shout()], 0), ([1], 2), (ImportError("no such thing"), 2)):
        monkeypatch.setattr(rules, "entry_points", lambda group, given=given: [_Point(given)])
        engine._loaded.cache_clear()
        assert main(["port", "train.py"]) == wanted
    engine._loaded.cache_clear()
    out, error = capsys.readouterr()
    assert "+cuda = SHOUT(1)" in out
    assert "entry point 'shout' of xamp.port_rules must lead to a list" in error
    assert "no such thing" in error


def test_without_libcst_the_cure_is_told(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["port", "train.py"]) == 2
    assert "pip install xamp[port]" in capsys.readouterr().err


def test_a_diff_is_one_that_git_takes(script: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    git(script.parent, "init", "-q")
    names = ("train.py", "a folder/b.py", 'odd "name".py', "new\nline.py", "\xe9.py", os.fsdecode(b"\xff.py"))
    for name in names:
        (script.parent / name).parent.mkdir(exist_ok=True)
        (script.parent / name).write_text(BEFORE)
    (script.parent / "crlf.py").write_bytes(BEFORE.replace("\n", "\r\n").encode())
    (script.parent / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\n" + BEFORE.rstrip().encode() + b" # \xe9")
    git(script.parent, "add", "-A")
    git(script.parent, "-c", "core.autocrlf=false", "commit", "-qm", "x")
    for path in (".", str(script.parent), *(f"./{name}" for name in names)):
        assert main(["port", "--jobs", "1", path]) == 0
        diff = capfdbinary.readouterr().out
        (script.parent.parent / "p.diff").write_bytes(diff)
        git(script.parent, "apply", "../p.diff")
        assert script.read_text() == (AFTER if path in (".", str(script.parent), "./train.py") else BEFORE)
        assert main(["port", "--check", path]) == 0
        git(script.parent, "checkout", "-q", "--", ".")
        capfdbinary.readouterr()


def test_a_fault_in_one_file_does_not_stop_the_others(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    class Broken(Rule):
        """Fails at a name."""

        name = "broken"
        kinds = ("Name",)

        def look(self, node: Any, work: Any) -> None:
            assert node.value != "trap"

    from xamp.port import engine, rules

    monkeypatch.setattr(rules, "entry_points", lambda group: [_Point([Broken()])])
    engine._loaded.cache_clear()
    (script.parent / "a.py").write_text("trap = x.cuda()\n")
    assert main(["port", "--write", "."]) == 1
    engine._loaded.cache_clear()
    assert "./a.py: a fault of xamp port: AssertionError" in capsys.readouterr().err
    assert script.read_text() == AFTER
    assert (script.parent / "a.py").read_text() == "trap = x.cuda()\n"
