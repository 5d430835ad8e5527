"""Asks a real model about a text that is longer than the accelerator tier's share of the KV cache, and shows where the
cache lay. The same questions are then asked with the whole cache on the accelerator tier: the tokens must be equal."""

import sys
from pathlib import Path

from ambidex import LLM, SamplingParams
from ambidex.core.ids import Lane, Tier
from ambidex.core.units import format_size

QUESTIONS = (
    "In which year was the lighthouse built?",
    "Who was the first keeper of the lighthouse, and what did he bring to the rock?",
)
NUM_GPU_TOKENS = 256
PARAMS = SamplingParams(max_output_tokens=48, temperature=0.0)


def ask(*, kv_gpu_tokens: int | None, is_shown: bool) -> list[tuple[int, ...]]:
    """Answer the questions; returns the token ids of each answer."""
    passage = Path(__file__).with_name("passage.txt").read_text(encoding="utf-8")
    answers = []
    with LLM("smollm2", kv_gpu_tokens=kv_gpu_tokens, block_size=32, num_sink_tokens=32, dtype="fp32") as llm:
        for question in QUESTIONS:
            output = None
            if is_shown:
                print(f"\n? {question}\n> ", end="")
            for output in llm.chat_stream([{"role": "user", "content": f"{passage}\n{question}"}], PARAMS):
                if is_shown:
                    print(output.delta, end="", flush=True)
            if output is None:
                raise SystemExit("the model gave no answer")
            answers.append(output.token_ids)
            if is_shown:
                print(f"\n  ({len(output.prompt_token_ids)} prompt tokens, {len(output.token_ids)} tokens of answer)")
        if is_shown:
            stats = llm.stats()
            print("\nKV cache of one request, at its largest:")
            for tier in (Tier.GPU, Tier.DRAM):
                print(f"  {tier:<5} tier  {format_size(stats.peak_kv_bytes.get(tier, 0)):>10}")
            print("Bytes of K and V read by attention:")
            for lane in Lane:
                print(f"  {lane:<5} lane  {format_size(stats.lane_bytes[lane]):>10}")
            print(f"Blocks demoted to DRAM while the requests ran: {stats.num_moves}")
    return answers


def main() -> int:
    """Run the demo; exit code 1 if the split run and the unsplit run differ."""
    print(f"SmolLM2-135M-Instruct, KV cache split: {NUM_GPU_TOKENS} tokens on the accelerator tier, the rest in DRAM")
    split = ask(kv_gpu_tokens=NUM_GPU_TOKENS, is_shown=True)
    unsplit = ask(kv_gpu_tokens=None, is_shown=False)
    is_equal = split == unsplit
    print(f"\nToken for token equal to the unsplit run: {'yes' if is_equal else 'NO'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
