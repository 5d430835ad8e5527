"""Which of torch's errors say that there is no memory."""

import pytest
import torch

from ambidex.storage.pinned import is_out_of_memory


def test_the_host_s_allocator_says_that_there_is_no_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_so_do_the_device_s_and_the_driver() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"))


@pytest.mark.parametrize(
    "words", ["CUDA error: an illegal memory access was encountered", "shape '[2]' is invalid for input of size 3"]
)
def test_faults_do_not(words: str) -> None:
    assert not is_out_of_memory(RuntimeError(words))


@pytest.mark.gpu
def test_the_driver_refuses_pinned_memory_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46, dtype=torch.uint8, pin_memory=True)
    assert is_out_of_memory(caught.value), str(caught.value)
