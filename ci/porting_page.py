"""Writes docs/porting.md: how to port, each rule of ``xamp port`` with before and after, and tables to port by hand.

Rules, their texts and examples are read from ``xamp/port/rules``; the tests run the same examples. What stands here is
the text around them and the tables. With ``--check`` nothing is written: it fails where the page is not what would be.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Sequence

from xamp.port.explain import about, change, in_order
from xamp.port.rule import Rule
from xamp.port.rules import built_in

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "porting.md"
COMMAND = ".venv/bin/python ci/porting_page.py"

HEAD = f"""# Port a script

`xamp port` rewrites training scripts that name CUDA, Apex or Ascend. What comes out runs on every device. It renames
and never restructures; lines without an edit stay as they are, byte by byte. Nothing of a script is executed or
imported.

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
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    loss = criterion(model(x), y)
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
    x, y = x.to(xamp.device(), non_blocking=True), y.to(xamp.device(), non_blocking=True)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    with xamp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
```

1. Commit the script, so that `--write` has something to go back to. Run `xamp port train.py` and read the diff.
2. `xamp port --write train.py`. Each comment `TODO(xamp)` marks what is left to do by hand; `--report port.html` lists
   them.
3. Run it on the machine that it was written for: `python train.py`. The losses must be the ones from before, but at
   Apex's O2: there only the first is, see [below](#losses-at-apexs-o2).
4. Run it on the CPU: `XAMP_DEVICE=cpu python train.py`, with little data. This finds texts that still name a device.
5. Run it on the NPU. xamp's backend imports `torch_npu`; the script does not. `xamp doctor` says what is there.
6. Keep it so: `xamp port --check` in CI, or the pre-commit hook `xamp-port`.

The way back is the same script: nothing in it names a device any more. A script that was ported to Ascend by hand
(`import torch_npu`, `.npu()`, `"hccl"`, `combine_grad=True`) is ported in the same way, and then runs on GPUs again.
A script without mixed precision gets it by `xamp port --write --add-amp O1 train.py`.

## Losses at Apex's O2

Apex makes the masters of O2 from weights that were rounded to fp16. `xamp.initialize` makes them from the exact ones.
So the first loss is the one from before, and the next ones part in the fourth digit or later: by 2e-4 in 20 steps of
a small network. That is no fault of the port. What to compare:

- At O0 and O1, and at O2 the first loss: equal on the same device, but for the order in which it adds.
- At O2 whole runs: no further apart than two runs with other seeds.
- Who needs the very losses of Apex keeps its rules, `from xamp.apex import amp`, which train as Apex did, bit for
  bit; or rounds the weights before `xamp.initialize`, in [five
  lines](guides/from-apex.md#the-same-losses-as-apexs-o2).

## What it does not do

- It does not follow values through functions and files. A name that is imported decides; a parameter called `amp` is
left alone, and works, because xamp has the names.
- It does not change what a script measures. Of files that are no Python it writes only what is certain: see
[below](#other-files-than-python).
- Frameworks that own the switch for precision (Lightning, accelerate, DeepSpeed) are told of and left alone.
- The line `if device.type == "cuda":` asks for an accelerator: it stays false on a CPU. Joined to
`not torch.cuda.is_available()` it asks for a device that is not there: the text stays as users write it, with a note.
- A text that may name a device gets a note where it cannot be told: `"cuda" + str(i)`, `run("cuda")`,
`name.startswith("cuda")`, `"cpu:gloo,cuda:nccl"`. So do `.cuda()` of a name that is imported, of a storage, and, in a
file with a class that has a `cuda` of its own, of what may be such an object; and `move = model.cuda`, the method as a
value. These places are kept.
- Each file is read by itself, with one exception: where another file of the same call takes `amp` from a file, that
file goes on binding `amp`.

## What it reads

Python 3.9 to 3.13: `match`, `except*`, type parameters with and without defaults, `type` statements, f-strings with
quotes, lines and comments inside. LibCST does not read an annotation of an attribute in brackets, `(a.b): int`: such a
file is told of, and left.

In a notebook the code cells are ported as one file. Lines for IPython stay as they are: `%magic`, `!command`,
`x = !command`, `x?`, also inside of blocks, and the first line of a cell such as `%%time`. Cells of other languages
(`%%javascript`) are left alone; a magic may stand below comments. What runs in a shell (`!cmd`, `%%bash`) is read as a
shell script, what `%%writefile x.py` writes as a file of its own. A cell that is no Python is told of and stays; the
others are ported. Only the text of edited cells changes, the rest of the file stays byte by byte.

`--add-amp` takes `loss.backward()` on a line of its own, and as the only statement of a line such as `if i:`. At
another place it leaves a note.

## Other files than Python

In a folder `xamp port` reads every text that names CUDA: shell scripts, Dockerfiles, Makefiles, files of environment
variables, YAML, JSON, TOML, INI, lists of packages, C++ and CUDA sources, texts for people. A file without an ending is
what its first line says. Texts of more than 16 MiB are taken for data. Folders called build and dist are read, unless
git ignores them or a build made them; the folders that are not read are told of. No file stops the others.

| what stands there | what becomes of it |
|---|---|
| `CUDA_VISIBLE_DEVICES=0 torchrun ...`, `export`, `env`, `setenv`, `ENV` | `ASCEND_RT_VISIBLE_DEVICES=0` beside it |
| `CUDA_VISIBLE_DEVICES: 0` of YAML, in an `.env`, a Makefile | a line for Ascend's below it |
| the same in quotes, in JSON, with `-1`, with numbers that do not ascend, with a command's output | a note |
| `CUDA_LAUNCH_BLOCKING` | `ASCEND_LAUNCH_BLOCKING` is written beside it |
| `_target_: apex.optimizers.FusedAdam`, a whole value that names a part of Apex or `torch.cuda` | xamp's name |
| `device: 'cuda:0'`, `backend: nccl`, `--device cuda` | a note with what to write on an NPU |
| `nvidia-smi`, `nvcc`, an image or a folder of CUDA, `--gpus`, `nvidia.com/gpu` | a note with what takes its place |
| a package for CUDA, in a list of packages or in a line that installs it | unsupported, with what to use |
| a CUDA source | unsupported, once for the file |

No comment goes into such a file: all is in the report, and counts for the exit code as it does in Python.

## What can never run on an NPU

An import of a library that works on CUDA only is unsupported, and the note says what to use where something exists:
`numba.cuda`, `spconv`, `cupy`, `pynvml`, `flash_attn`, `xformers`, `bitsandbytes`, `MinkowskiEngine`, `mmcv.ops`,
`pycuda`, DALI, `triton`, TensorRT and others. So are `nvidia-smi` by subprocess and the build of a CUDA extension.
Where the import stands in a `try` that catches its failure, it is noted, and the exit code stays 0. A library that
stands in the searched folder itself is ported like the rest. `xamp/port/cuda_only.py` is the table: a row adds a
library, a name, a program or an environment variable.

## Every line that names CUDA

Each is edited, has a note, or stands in `--report` with the reason why it stays: a comment, a text that people read, a
key, a name of the project's own, a name of another file, a part of a statement that is told of. So it is with all lines
of thirteen public repositories. None of their files is broken, and `git apply` takes each diff.

| repository | files | changed | lines that name CUDA | edited | with a note | with a reason |
|---|--:|--:|--:|--:|--:|--:|
| second.pytorch | 117 | 15 | 254 | 15 | 143 | 96 |
| RAFT | 20 | 5 | 43 | 17 | 4 | 22 |
| nanoGPT | 18 | 4 | 30 | 25 | 1 | 4 |
| Swin-Transformer | 34 | 11 | 145 | 78 | 5 | 62 |
| SupContrast | 7 | 4 | 41 | 37 | 0 | 4 |
| SimCLR | 12 | 3 | 17 | 7 | 4 | 6 |
| tacotron2 | 25 | 7 | 48 | 18 | 6 | 24 |
| vits | 19 | 3 | 42 | 40 | 0 | 2 |
| stylegan2-ada-pytorch | 48 | 14 | 308 | 27 | 14 | 267 |
| YOLOP | 48 | 4 | 158 | 18 | 17 | 123 |
| yolov5 | 61 | 13 | 257 | 46 | 15 | 196 |
| OpenPCDet | 250 | 42 | 870 | 128 | 168 | 574 |
| mamba | 94 | 47 | 1,393 | 207 | 563 | 623 |
| together | 753 | 172 | 3,606 | 663 | 940 | 2,003 |

nanoGPT and Swin-Transformer, as the port left them, train on the emulated card: a small GPT in fp16 for 40 steps, and a
small Swin under DDP for two epochs, on data that were made up.

The same of eighteen more: ten of Ascend's, which train with torch_npu or Ascend's Apex (the first of the two tables;
GRU, PPO, WaveGlow, PraNet, LightGCN, RotatE and GaitSet are projects of ModelZoo-PyTorch), and eight for CUDA.
Notebooks are not counted. One file is not read, and told of: it is in another encoding than it says. Each diff was
read.

| repository | files | changed | lines that name CUDA | edited | with a note | with a reason |
|---|--:|--:|--:|--:|--:|--:|
| Ascend's transformers | 28 | 2 | 35 | 14 | 0 | 21 |
| AscendSpeed | 173 | 32 | 293 | 24 | 29 | 240 |
| MindSpeed-RL (reinforcement learning) | 387 | 36 | 284 | 99 | 34 | 151 |
| GRU (translation) | 21 | 7 | 15 | 9 | 0 | 6 |
| PPO (reinforcement learning) | 13 | 3 | 5 | 4 | 0 | 1 |
| WaveGlow (speech) | 45 | 12 | 71 | 22 | 5 | 44 |
| PraNet (segmentation) | 25 | 7 | 32 | 23 | 1 | 8 |
| LightGCN (recommendation) | 14 | 3 | 9 | 6 | 0 | 3 |
| RotatE (graphs of knowledge) | 23 | 5 | 84 | 29 | 1 | 54 |
| GaitSet (gait) | 36 | 7 | 11 | 3 | 0 | 8 |

| repository | files | changed | lines that name CUDA | edited | with a note | with a reason |
|---|--:|--:|--:|--:|--:|--:|
| ParallelWaveGAN (speech) | 394 | 5 | 399 | 11 | 68 | 320 |
| pytorch-a2c-ppo-acktr-gail (reinforcement learning) | 145 | 5 | 61 | 9 | 2 | 50 |
| Informer2020 (time series) | 27 | 4 | 10 | 7 | 1 | 2 |
| pyGAT (graphs) | 12 | 3 | 16 | 13 | 0 | 3 |
| improved-diffusion (diffusion) | 25 | 2 | 8 | 5 | 0 | 3 |
| Pytorch-UNet (segmentation) | 21 | 3 | 11 | 5 | 1 | 5 |
| NCF (recommendation) | 6 | 2 | 9 | 5 | 2 | 2 |
| DPR (retrieval) | 45 | 7 | 44 | 23 | 0 | 21 |
| both tables together | 1,440 | 145 | 1,397 | 311 | 144 | 942 |

RotatE, LightGCN, WaveGlow, pyGAT, NCF and Informer2020, as the port left them, train on data that were made up, on
the CPU and on the emulated card. In NCF the place with a note was written by hand first. RotatE, LightGCN and
WaveGlow as they were start by `xamp run` on a CPU and by `xamp emulate`, and train too. What newer releases of numpy
and torch no longer have was mended in three of them before (`np.Inf`, `np.in1d`, `_output_padding`), and librosa
stood in for.

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

For whom a codemod is too much, or who ports what it does not see.

### From Apex

| Apex | xamp |
|---|---|
| `from apex import amp` | `import xamp as amp`, or `from xamp.apex import amp` for Apex's rules to the letter |
| `amp.initialize(model, opt, opt_level="O1")` | `xamp.initialize(model, opt, level="O1")` |
| `amp.scale_loss`, `master_params`, `state_dict`, `load_state_dict` | the same names in `xamp` |
| `amp._amp_state.loss_scalers[0].loss_scale()` | `xamp.loss_scale()` |
| `apex.parallel`, `optimizers`, `normalization`, `fp16_utils`, ... | `xamp.apex.parallel`, ... |

### From torch.cuda.amp

| torch.cuda.amp | xamp |
|---|---|
| `autocast(enabled)`, `GradScaler(...)` | `xamp.autocast(enabled)`, `xamp.GradScaler(...)`, with the same methods |
| `custom_fwd`, `custom_bwd` | `xamp.custom_fwd`, `xamp.custom_bwd` |

### From torch.amp

| torch.amp | xamp |
|---|---|
| `torch.autocast("cuda", dtype=d)` | `xamp.autocast(dtype=d)` |
| `torch.amp.GradScaler("cuda")` | `xamp.GradScaler()` |
| `torch.autocast(device_type=device.type)` | stays |

### From torch_npu

| torch_npu | xamp |
|---|---|
| `import torch_npu` | nothing: the backend imports it |
| `x.npu()`, `"npu:0"` | `x.to(xamp.device())`, `xamp.device(0)` |
| `torch.npu.x(...)`, `torch_npu.npu.x(...)` | `xamp.accel.x(...)` |
| `"hccl"` | `xamp.distributed_backend()` |
| `amp.initialize(..., combine_grad=True)` | leave it out |
| `NpuFusedSGD`, ... | `xamp.apex.optimizers.NpuFusedSGD`, or `torch.optim.SGD`, which `initialize` makes fused |
| `from torch_npu.contrib import transfer_to_npu` | delete the line |

### From accelerate and Lightning

| there | xamp |
|---|---|
| `Accelerator(mixed_precision="fp16")`, `Trainer(precision="16-mixed")` | level O1 |
| `Accelerator(mixed_precision="bf16")`, `Trainer(precision="bf16-mixed")` | level O4 |
| `Trainer(precision="16-true")` | level O3 |
| `Trainer(precision="bf16-true")` | level O5, which keeps fp32 masters |
| `accelerator.backward(loss)` | `with xamp.scale_loss(loss, optimizer) as scaled: scaled.backward()` |
| `accelerator.clip_grad_norm_(model.parameters(), 1.0)` | `xamp.clip_grad_norm_(optimizer, 1.0)` |

"""


def page() -> str:
    """The whole page."""
    return "".join(
        (HEAD, TABLES, "## Rules\n\nIn the order in which real scripts need them.\n", *rules(in_order(built_in())))
    )


def rules(found: Sequence[Rule]) -> Iterator[str]:
    """A section for each rule."""
    for rule in found:
        yield f"\n### {rule.name}\n\n{rule.grade.value.capitalize()}. {about(rule)}\n"
        for example in rule.examples:
            yield f"\n```diff\n{change(*example).rstrip()}\n```\n"
        if rule.unchanged:
            yield "\nIt leaves alone:\n\n```\n" + "\n".join(text.rstrip() for text in rule.unchanged) + "\n```\n"


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
