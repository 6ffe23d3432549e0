"""The block on pipelines of docs/guides/distributed.md, run by two processes.

Covers: docs/guides/distributed.md, xamp.distributed.wrappers.
"""

from __future__ import annotations

from pathlib import Path

from forked_ranks import Ranks


def test_the_stages_train_as_one_process_and_skip_together(forked_ranks: Ranks, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "pipeline_page_worker.py"
    for found in forked_ranks.results(worker, folder=tmp_path):
        assert (found["applied"], found["skipped"], found["scale"]) == (3, 1, 2.0**15)
        assert found["off"] < 3e-3  # of the largest move of a weight: 3 eps of fp16
