"""`TorchThreads`: small steps leave the cores to the native threads."""

import torch

from ambidex.kernels.linear import MOST_NATIVE_TOKENS
from ambidex.runner.torch_threads import TorchThreads


def test_steps_of_few_tokens_get_one_thread_and_others_all_of_them() -> None:
    before = torch.get_num_threads()
    threads = TorchThreads(2)
    try:
        threads.choose(MOST_NATIVE_TOKENS)
        assert torch.get_num_threads() == 1
        threads.choose(MOST_NATIVE_TOKENS + 1)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)  # as another engine would
        threads.choose(MOST_NATIVE_TOKENS + 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
