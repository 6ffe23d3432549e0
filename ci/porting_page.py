"""Writes docs/porting.md: how to port, each rule of ``xamp port`` with an example, and a table to port by hand.

Rules, their texts and first examples are read from ``xamp/port/rules``; the tests run all examples. What stands here
is the text around them and the tables. With ``--check`` nothing is written: it fails where the page is not what would
be.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Sequence

from xamp.port.explain import about, change, in_order
from xamp.port.rule import Example, Rule
from xamp.port.rules import built_in

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "porting.md"
COMMAND = ".venv/bin/python ci/porting_page.py"

HEAD = f"""# Port a script

`xamp port` rewrites training scripts that name CUDA, Apex or Ascend, so that they run on every device. It renames and
never restructures; lines without an edit stay as they are, byte by byte. Nothing of a script is executed or imported.

    pip install xamp[port]
    xamp port train.py                      # print what would change
    xamp port --write src/                  # change it
    xamp port --check src/                  # exit code 1 where something is to port: for CI

This page is made by `{COMMAND}`.

## From a GPU to an NPU, and back

A script for NVIDIA GPUs, with Apex:

```python
import torch
from apex import amp

torch.cuda.set_device(args.local_rank)
torch.distributed.init_process_group(backend="nccl")
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
for x, y in loader:
    loss = criterion(model(x.cuda(non_blocking=True)), y.cuda())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
```

`xamp port --write train.py` makes of it:

```python
import torch
import xamp

xamp.accel.set_device(args.local_rank)
torch.distributed.init_process_group(backend=xamp.distributed_backend())
model = Net().to(xamp.device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = xamp.initialize(model, optimizer, level="O2")
for x, y in loader:
    loss = criterion(model(x.to(xamp.device(), non_blocking=True)), y.to(xamp.device()))
    optimizer.zero_grad()
    with xamp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
```

[Step by step](guides/gpu-npu.md#step-by-step) says how to try the result. `--report port.html` lists what is left to do
by hand. `xamp port --check` in CI, or the pre-commit hook `xamp-port`, keeps scripts so.

The way back is the same script. A script that was ported to Ascend by hand
(`import torch_npu`, `.npu()`, `"hccl"`) is ported in the same way. A script without mixed precision gets it by
`xamp port --write --add-amp O1 train.py`. `loss.backward()` must be a line of its own, or the only statement of a line
such as `if i:`; at another place there is a note.

## Losses at Apex's O2

Apex makes the masters of O2 from weights that were rounded to fp16, `xamp.initialize` from the exact ones. So the first
loss is the one from before, and the next ones part in the fourth digit or later: by 2e-4 in 20 steps of a small
network. What to compare:

- At O0 and O1, and at O2 the first loss: equal on the same device, but for the order in which it adds.
- At O2 whole runs: no further apart than two runs with other seeds.
- For Apex's own losses, bit for bit, write `from xamp.apex import amp`; or round the weights before `xamp.initialize`,
  in [five lines](guides/from-apex.md#the-same-losses-as-apexs-o2).

## What it does not do

- It does not follow values through functions and files. A name that is imported decides. A parameter called `amp` is
  left alone, and works, because xamp has the names. One exception: where another file of the same call takes `amp` from
  a file, that file goes on binding `amp`.
- It does not change what a script measures.
- It leaves frameworks that own the switch for precision (Lightning, accelerate, DeepSpeed), and reports them.
- It keeps a text or a call of which it cannot tell whether a device is meant, and notes the place: `"cuda" + str(i)`,
  `run("cuda")`, `name.startswith("cuda")`, `"cpu:gloo,cuda:nccl"`, `move = model.cuda`, `.cuda()` of an imported name,
  of a storage, and of what may be an object of a class in the file that has a `cuda` of its own.
- It leaves a file or a cell that is no Python, and one with an annotation `(a.b): int`, which LibCST does not read, and
  says so; the others are ported. Python 3.9 to 3.13 is read.

## Notebooks

The code cells are ported as one file. Lines for IPython (`%magic`, `!command`, `x?`, a first line `%%time`), inside of
blocks too, and cells of other languages stay. `!cmd` and `%%bash` are read as a shell script, `%%writefile x.py` as a
file of its own. Only the text of edited cells changes.

## Other files than Python

In a folder `xamp port` reads every text that names CUDA or Ascend: shell scripts, Dockerfiles, Makefiles, `.env`,
YAML, JSON, TOML, INI, lists of packages, C++ and CUDA sources, texts for people. A file without an ending is what its
first line says; texts of more than 16 MiB are taken for data. Folders called build and dist are read, unless git
ignores them or a build made them. Folders that are not read are named.

| what stands there | what becomes of it |
|---|---|
| `CUDA_VISIBLE_DEVICES=0 torchrun ...`, `export`, `env`, `setenv`, `ENV` | `ASCEND_RT_VISIBLE_DEVICES=0` beside it |
| `CUDA_VISIBLE_DEVICES: 0` of YAML, in an `.env`, a Makefile | a line for Ascend's below it |
| the same in quotes, in JSON, with `-1`, with numbers that do not ascend, with a command's output | a note |
| `CUDA_LAUNCH_BLOCKING` | `ASCEND_LAUNCH_BLOCKING` is written beside it |
| `ASCEND_RT_VISIBLE_DEVICES`, `device: npu`, `npu-smi`, `torch_npu` in a list of packages | a note |
| a whole value that names a part of Apex or `torch.cuda`: `_target_: apex.optimizers.FusedAdam` | xamp's name |
| `device: 'cuda:0'`, `backend: nccl`, `--device cuda` | a note with what to write on an NPU |
| `nvidia-smi`, `nvcc`, an image or a folder of CUDA, `--gpus`, `nvidia.com/gpu` | a note with what takes its place |
| a package for CUDA, in a list of packages or in a line that installs it | unsupported, with what to use |
| a CUDA source | unsupported, once for the file |

No comment goes into such a file: all is in the report, and counts for the exit code as it does in Python.

## What can never run on an NPU

An import of one vendor's library is unsupported, and the note says what to use where something exists:
`numba.cuda`, `spconv`, `cupy`, `flash_attn`, `xformers`, `bitsandbytes`, `mmcv.ops`, DALI, `triton`, TensorRT and
others; `xamp/port/vendor_only.py` is the table, with Ascend's own (`acl`, `mindspeed`). So are
`nvidia-smi` by subprocess and the build of a CUDA extension.
In a `try` that catches the failure it is noted, and the exit code stays 0. A library that stands in the searched folder
itself is ported like the rest.

## Every line that names a device

Each is edited, has a note, or stands in `--report` with the reason why it stays: a comment, a text that people read, a
key, a name of the project's own, a name of another file, a part of a statement that is told of. All lines of
these public repositories have one, no file was broken, and `git apply` takes each diff.

| repositories | files | changed | lines that name a device | edited | with a note | with a reason |
|---|--:|--:|--:|--:|--:|--:|
| thirteen for CUDA | 753 | 172 | 3,606 | 663 | 940 | 2,003 |
| ten of Ascend's and eight more for CUDA, without notebooks | 959 | 150 | 5,307 | 480 | 549 | 4,278 |

- The thirteen: second.pytorch, RAFT, nanoGPT, Swin-Transformer, SupContrast, SimCLR, tacotron2, vits,
  stylegan2-ada-pytorch, YOLOP, yolov5, OpenPCDet, mamba.
- Ascend's: transformers, AscendSpeed, MindSpeed-RL, and of ModelZoo-PyTorch GRU, PPO, WaveGlow, PraNet, LightGCN,
  RotatE, GaitSet.
- The eight: ParallelWaveGAN, pytorch-a2c-ppo-acktr-gail, Informer2020, pyGAT, improved-diffusion, Pytorch-UNet, NCF,
  DPR. One file was not read, and told of: it is in another encoding than it says.

As the port left them, small models of nanoGPT and Swin-Transformer train on the emulated card, and RotatE, LightGCN,
WaveGlow, pyGAT, NCF and Informer2020 on it and on the CPU, on data that were made up. NCF's place with a note was
written by hand; three were mended for newer releases of numpy and torch, with a stand-in for librosa. RotatE, LightGCN
and WaveGlow as they were train by `xamp run` on a CPU and by `xamp emulate`.

## Grades

| grade | what happens |
|---|---|
| certain | rewritten, nothing is said |
| neutral | runs everywhere as it stands |
| noted | rewritten or kept, with a comment `TODO(xamp)` or a line in the report |
| unsupported | left as it is, with a comment; exit code 1 |

A comment `# xamp: ignore` on a line, or `# xamp: ignore[RULE]`, keeps it from being touched.

## Options and settings

`xamp port --help` has all. Settings of a project stand in its pyproject.toml:

```toml
[tool.xamp.port]
include = ["*.py"]
exclude = ["third_party", "tests/data"]
jobs = 4
```

For pre-commit:

```yaml
- repo: <the address of xamp>
  hooks:
    - id: xamp-port
```

Another package adds rules by the entry-point group `xamp.port_rules`. The entry point leads to a list of
`xamp.port.Rule` objects; `xamp/port/rule.py` says what a rule is.

"""

TABLES = """## By hand

For those who port without the command, or what it does not see. CUDA's names are in [GPU to NPU and
back](guides/gpu-npu.md#what-to-replace).

| there | xamp |
|---|---|
| `from apex import amp` | `import xamp as amp`, or `from xamp.apex import amp` for Apex's rules to the letter |
| `amp.initialize(model, opt, opt_level="O1")` | the same with `level="O1"` and without `combine_grad=True` |
| Apex's `amp.scale_loss`, `master_params`, `state_dict`, `load_state_dict` | the same names in `xamp` |
| `amp._amp_state.loss_scalers[0].loss_scale()` | `xamp.loss_scale()` |
| `apex.parallel`, `optimizers`, `normalization`, `fp16_utils`, ... | `xamp.apex.parallel`, ... |
| `torch.cuda.amp.autocast(enabled)`, `GradScaler(...)`, `custom_fwd`, `custom_bwd` | the same names in `xamp` |
| `torch.autocast("cuda", dtype=d)`, `torch.amp.GradScaler("cuda")` | `xamp.autocast(dtype=d)`, `xamp.GradScaler()` |
| `torch.autocast(device_type=device.type)` | stays |
| `import torch_npu`, `from torch_npu.contrib import transfer_to_npu` | delete the line: the backend imports torch_npu |
| `x.npu()`, `"npu:0"`, `torch.npu.x(...)` | `x.to(xamp.device())`, `xamp.device(0)`, `xamp.accel.x(...)` |
| `"hccl"` | `xamp.distributed_backend()` |
| `NpuFusedSGD`, ... | `xamp.apex.optimizers.NpuFusedSGD`, or `torch.optim.SGD`, which `initialize` makes fused |
| `Accelerator(mixed_precision="fp16")`, `Trainer(precision="16-mixed")` | level O1 |
| `Accelerator(mixed_precision="bf16")`, `Trainer(precision="bf16-mixed")` | level O4 |
| `Trainer(precision="16-true")` | level O3 |
| `Trainer(precision="bf16-true")` | level O5, which keeps fp32 masters |
| `accelerator.backward(loss)` | `with xamp.scale_loss(loss, optimizer) as scaled: scaled.backward()` |
| `accelerator.clip_grad_norm_(model.parameters(), 1.0)` | `xamp.clip_grad_norm_(optimizer, 1.0)` |

"""

RULES = """## Rules

In the order in which real scripts need them, with an example where code changes. `xamp port --explain RULE` prints all
examples of a rule, and what it leaves alone.
"""


def page() -> str:
    """The whole page."""
    return "".join((HEAD, TABLES, RULES, *rules(in_order(built_in()))))


def rules(found: Sequence[Rule]) -> Iterator[str]:
    """A section for each rule, with the first example that changes code; ``--explain`` has all of them."""
    for rule in found:
        yield f"\n### {rule.name}\n\n{rule.grade.value.capitalize()}. {about(rule)}\n"
        for example in [example for example in rule.examples if changes_code(example)][:1]:
            yield f"\n```diff\n{change(*example).rstrip()}\n```\n"


def changes_code(example: Example) -> bool:
    """Whether a line that is no note is another one after porting."""
    after = (example.after or example.before).splitlines()
    return [line for line in after if "# TODO(xamp): " not in line] != example.before.splitlines()


def main(words: Sequence[str]) -> int:
    """Writes the page, or checks it; returns the exit status."""
    made = page()
    if "--check" not in words:
        PAGE.write_text(made, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made:
        print(f"docs/porting.md is not what the rules say. Run: {COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
