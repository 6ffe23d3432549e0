"""A run of the suite ends early where its caller says so.

Covers: xamp.testing.run.
"""

from __future__ import annotations

from xamp.testing.lane import open_lane
from xamp.testing.run import Result, run


def test_it_ends_after_the_result_that_the_caller_waits_for() -> None:
    everything = [result.clause for result in run([open_lane("cpu")], ["probe.*"])]
    third = everything[2]
    seen: list[str] = []

    def is_third(result: Result) -> bool:
        seen.append(result.clause)
        return result.clause == third

    assert [result.clause for result in run([open_lane("cpu")], ["probe.*"], until=is_third)] == everything[:3] == seen
    assert [result.clause for result in run([open_lane("cpu")], ["probe.*"], until=lambda _: False)] == everything
