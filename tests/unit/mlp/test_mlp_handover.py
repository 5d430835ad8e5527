"""`WeightHandover`: the CPU answers place after place, recorded or not, and nobody waits for ever."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import LaneError
from ambidex.core.model_spec import Activation
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.recorded import Arena
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.handover import WeightHandover
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.split_site import HostPlace
from ambidex.runner.host_answers import HostAnswers

CPU = torch.device("cpu")
NUM_ROWS = 3
SHAPES = [SiteShape(num_in=24, num_rows=48), SiteShape(num_in=24, num_rows=64, num_ins=2, num_out=24)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_side(shape: SiteShape, linear: LinearContext) -> HostSide:
    torch.manual_seed(shape.num_rows)
    chunks = [range(16, 32), range(32, 48)]
    parts = [
        Part(
            Rows(shape, rows, torch.randn(shape.numbers_per_row * len(rows)).view(torch.uint8), torch.float32),
            Activation.SILU if shape.num_out else None,
            linear,
        )
        for rows in chunks
    ]
    return HostSide(shape, parts)


class World:
    def __init__(self, *, is_recorded: bool) -> None:
        linear = LinearContext(ThreadPool(1))
        self.sides = [make_side(shape, linear) for shape in SHAPES]
        places = [HostPlace(side=side, layer_idx=0, is_before_attention=False) for side in self.sides]
        self.handover = WeightHandover(
            places, NUM_ROWS, dtype=torch.float32, device=CPU, arena=Arena() if is_recorded else None
        )
        self.answers = HostAnswers(None, self.handover, places, num_layers=1)

    def step(self, xs: list[Tensor]) -> list[Tensor]:
        got = []
        self.answers.reset()
        with self.answers.answering(None):
            for side, x in zip(self.sides, xs, strict=True):
                rows, answer = self.handover.begin(side, x)()
                assert rows == range(16, 48)
                got.append(answer.clone())
        return got


@pytest.mark.parametrize("is_recorded", [False, True], ids=["computed", "recorded"])
def test_the_cpu_answers_every_place_of_every_step(is_recorded: bool) -> None:
    world = World(is_recorded=is_recorded)
    for seed in range(4):  # recorded in the first, run in the others
        generator = torch.Generator().manual_seed(seed)
        xs = [torch.randn(NUM_ROWS, 24, generator=generator) for _ in SHAPES]
        for answer, side, x in zip(world.step(xs), world.sides, xs, strict=True):
            torch.testing.assert_close(answer, side.compute(x))
            assert answer.abs().max() > 1
    assert [program is not None for program in world.handover._programs] == [is_recorded] * 2


def test_a_place_that_is_never_asked_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.mlp.handover.WAIT_LIMIT_S", 0.05)
    world = World(is_recorded=False)
    world.answers.reset()
    world.handover.begin(world.sides[0], torch.zeros(NUM_ROWS, 24))
    with pytest.raises(LaneError, match="no input of layer 0, MLP to the CPU lane"):
        world.answers.answer(None)
    world.handover._receive(1)  # would wait for ever if the word were not set


def test_an_answer_that_never_comes_names_the_lane_and_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.storage.words.WAIT_LIMIT_S", 0.05)
    world = World(is_recorded=False)
    world.answers.reset()
    receive = world.handover.begin(world.sides[0], torch.zeros(NUM_ROWS, 24))
    with pytest.raises(LaneError, match="CPU lane, weights in DRAM, layer 0, attention's output: another lane"):
        receive()


def test_words_are_described() -> None:
    world = World(is_recorded=False)
    world.answers.reset()
    world.handover.begin(world.sides[0], torch.zeros(NUM_ROWS, 24))
    assert world.answers.describe() == (
        "of 2 products with weights in DRAM 1 were asked, 0 answered; next: layer 0, attention's output"
    )
    world.handover.answer(0)
    assert "1 answered; next: layer 0, MLP" in world.answers.describe()
    world.answers.release()
    assert world.answers.describe().endswith("2 answered")


def test_a_launch_that_breaks_off_does_not_keep_the_cpu_waiting() -> None:
    world = World(is_recorded=False)
    world.answers.reset()
    world.handover.begin(world.sides[0], torch.zeros(NUM_ROWS, 24))
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), world.answers.answering(None):
        raise ZeroDivisionError
    assert time.monotonic() - start < 10
