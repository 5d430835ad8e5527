"""When the CPU does its part of a step whose launch is one call."""

import threading
from dataclasses import dataclass
from typing import Any, cast

from ambidex.mlp.handover import WeightHandover
from ambidex.mlp.split_site import HostPlace
from ambidex.runner.host_answers import HostAnswers


class Side:
    """A handover that notes what is done with it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.has_answered = threading.Event()

    def mark_launched(self) -> None:
        self.events.append("launched")

    def release(self) -> None:
        self.events.append("released")

    def answer(self, _: Any) -> None:
        self.events.append("answered")
        self.has_answered.set()


@dataclass(frozen=True)
class Place:
    layer_idx: int = 0
    is_before_attention: bool = True


def test_the_cpu_answers_while_the_launch_waits_for_it() -> None:
    # Bug: a step of 16 requests and 80 layers was answered behind its launch, which waited for the first answers.
    side = Side()
    host = HostAnswers(None, cast(WeightHandover, side), [cast(HostPlace, Place())], num_layers=1)
    with host.answering(None):
        assert side.has_answered.wait(30)
    assert side.events == ["answered", "launched"]


def test_a_launch_that_breaks_off_ends_the_waits() -> None:
    side = Side()
    host = HostAnswers(None, cast(WeightHandover, side), [], num_layers=1)
    try:
        with host.answering(None):
            raise RuntimeError("a lost device")
    except RuntimeError:
        pass
    assert "released" in side.events
