from dataclasses import replace

import pytest

from ambidex.sched.admission import Admission, AdmissionState, decide_admission

FITS = AdmissionState(
    num_needed_blocks=3,
    num_reserved_blocks=2,
    num_free_blocks=5,
    num_total_blocks=8,
    num_running=1,
    max_running=2,
    num_budget_tokens=1,
)


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        ({}, Admission.ADMIT),
        ({"num_needed_blocks": 4}, Admission.NO_BLOCKS),
        ({"num_reserved_blocks": 3}, Admission.NO_BLOCKS),
        ({"num_free_blocks": 4}, Admission.NO_BLOCKS),
        ({"num_needed_blocks": 9}, Admission.NEVER_FITS),
        ({"num_running": 2}, Admission.TOO_MANY_RUNNING),
        ({"num_budget_tokens": 0}, Admission.NO_TOKENS),
        ({"num_needed_rows": 9, "num_free_rows": 9}, Admission.ADMIT),
        ({"num_needed_rows": 9, "num_free_rows": 8}, Admission.NO_ROWS),
    ],
)
def test_admission_for_each_state_gives_its_reason(change: dict[str, int], decision: Admission) -> None:
    assert decide_admission(replace(FITS, **change)) is decision


def test_admission_of_request_as_big_as_all_tiers_admits_when_all_is_free() -> None:
    state = replace(FITS, num_needed_blocks=8, num_free_blocks=8, num_reserved_blocks=0, num_running=0)
    assert decide_admission(state) is Admission.ADMIT
