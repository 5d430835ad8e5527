"""How does this engine decode beside its peers, run from their own packages, with the same weights and prompts?

    python bench/peers/compare.py --report FOLDER                                     # SmolLM2 on the CPU
    python bench/peers/compare.py --report FOLDER --shape llama-3.1-8b --contexts 16384 \
        --variants gpu-ambidex-exact,gpu-transformers-offloaded                       # random weights on a GPU
    python bench/peers/compare.py --report FOLDER --shape opt-6.7b --contexts 1920 --variants gpu-ours

Each variant (`decode_engines.ALL_VARIANTS`; `ours` and `gpu-ours` stand for every policy) runs in a process of its own,
greedy, batch 1, after a short answer that is not counted. Random weights are made once, by transformers, and read by
all. Lines go into the folder as those of `ambidex bench compare`, and so does the report; a variant that fails is
recorded with its reason. Prints how many times as fast each is as the first, and up to where tokens are equal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import decode_cpu
from ambidex.bench.figures import Quantiles, significant
from ambidex.compare.cells import Cell, CellKind
from ambidex.compare.folder import ReportFolder
from ambidex.compare.run import write_report
from ambidex.compare.watch import explain_exit
from ambidex.core.errors import AmbidexError
from ambidex.core.policy import PolicyName
from ambidex.hw.topology import read_topology
from decode_engines import ALL_VARIANTS, Job, Kind
from harness import environment
from peers.shapes import SHAPES, save_random_model

CPU_DEFAULT: Final = "ambidex,ambidex-fp32-split,llama.cpp,transformers-fp32,transformers-bf16"
GPU_DEFAULT: Final = "gpu-ambidex-exact,gpu-transformers-offloaded,gpu-transformers-dynamic"
GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "ours": [f"ambidex-{policy}" for policy in PolicyName],
    "gpu-ours": [f"gpu-ambidex-{policy}" for policy in PolicyName],
}


def main() -> int:
    """Measure what the folder does not hold, print, report; exit code 3: a variant has failed."""
    args = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the variant that runs, too
    try:
        with ReportFolder(args.report) as folder:
            name = find_name(args)
            if left := find_left(args, folder, name):
                with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
                    model, prompts = prepare(args, Path(scratch))
                    measure(args, folder, left, model=model, prompts=prompts, name=name)
            write_report(folder)
            return summarise(folder, args.variants)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2


def parse_options() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--report", type=Path, required=True, help="folder of the report, as of ambidex bench compare")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a .gguf file")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead, in bf16")
    parser.add_argument("--contexts", default="512,2048", help="tokens of the prompts")
    parser.add_argument("--steps", type=int, default=32, help="decode steps after each prompt")
    parser.add_argument("--variants", help="what to run; the first is what others are compared with")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt computed at once; default: 512, on a GPU 2048")
    parser.add_argument(
        "--threads",
        type=int,
        default=read_topology().num_usable_cores,
        help="of every engine; this one leaves a core of as many to the GPU's driver, if it has one",
    )
    parser.add_argument("--wait", type=float, default=20, help="longest wait for a quiet machine, seconds a prompt")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a variant has failed")
    parser.add_argument("--retry", action="store_true", help="measure variants again that have failed")
    parser.add_argument("--scratch", type=Path, help="folder for random weights while it runs: 16 GB for an 8B model")
    args = parser.parse_args()
    words = (args.variants or (GPU_DEFAULT if args.shape else CPU_DEFAULT)).split(",")
    args.variants = list(dict.fromkeys(name for word in words for name in GROUPS.get(word, [word])))
    if unknown := [name for name in args.variants if name not in ALL_VARIANTS]:
        parser.error(f"--variants {','.join(unknown)}: known are {','.join([*ALL_VARIANTS, *GROUPS])}")
    try:
        args.contexts = sorted({int(word) for word in args.contexts.split(",")})
    except ValueError:
        parser.error(f"--contexts {args.contexts}: give numbers of tokens, as in 512,2048")
    if min(*args.contexts, args.steps, args.threads) < 1:
        parser.error("contexts, --steps and --threads must be at least 1")
    args.chunk = args.chunk or (2048 if any(name.startswith("gpu-") for name in args.variants) else 512)
    return args


def find_name(args: argparse.Namespace) -> str:
    """What the model is called in the report.

    Raises:
        CallerError: there is no such model.
    """
    return f"{args.shape}, random weights" if args.shape else decode_cpu.find_gguf(args.model).files[0].name


def find_left(args: argparse.Namespace, folder: ReportFolder, name: str) -> dict[str, list[int]]:
    """What the folder does not hold yet: for each variant the places of its contexts."""
    known = {Cell.of(line["cell"]).key for line in folder.lines() if line["status"] == "done" or not args.retry}
    left = {
        variant: [place for place, context in enumerate(args.contexts)
                  if make_cell(args, variant, name, context).key not in known]
        for variant in args.variants
    }  # fmt: skip
    return {variant: places for variant, places in left.items() if places}


def prepare(args: argparse.Namespace, scratch: Path) -> tuple[str, list[list[int]]]:
    """The model's path, and the prompts.

    Raises:
        CallerError: there is no such model, or no text that is long enough.
    """
    if args.shape is None:
        source = decode_cpu.find_gguf(args.model)
        options = decode_cpu.Options(
            model=args.model, text=None, contexts=tuple(args.contexts), steps=args.steps, rounds=1, variants=(),
            threads=args.threads, wait=args.wait, skip_missing=True, output=args.report,
        )  # fmt: skip
        return str(source.files[0]), decode_cpu.make_prompts(options, source)[1]
    vocab_size = save_random_model(args.shape, scratch)
    rng = random.Random(1)
    ids = [rng.randrange(3, vocab_size) for _ in range(max(args.contexts))]
    return str(scratch), [ids[:context] for context in args.contexts]


def measure(
    args: argparse.Namespace,
    folder: ReportFolder,
    left: Mapping[str, Sequence[int]],
    *,
    model: str,
    prompts: Sequence[Sequence[int]],
    name: str,
) -> None:
    """Run the variants that have contexts left."""
    opening = environment()
    for variant, places in left.items():
        print(f"{variant} …", file=sys.stderr, flush=True)
        result = run_variant(args, variant, model, [list(prompts[place]) for place in places])
        for number, place in enumerate(places):
            outcome = (
                {"status": "failed", "reason": result["failed"]}
                if "failed" in result
                else {"status": "done", "figures": make_figures(result, result["answers"][number])}
            )
            cell = make_cell(args, variant, name, args.contexts[place])
            folder.append({"cell": cell.record(), **outcome, **opening})


def make_cell(args: argparse.Namespace, variant: str, name: str, context: int) -> Cell:
    """The cell of a variant and context: what its figures depend on is in it."""
    settings = {
        "steps": args.steps, "chunk": args.chunk, "threads": threads_of(args, variant),
        **{key: str(value) for key, value in asdict(ALL_VARIANTS[variant]).items()},
    }  # fmt: skip
    return Cell(kind=CellKind.SPEED, engine=ALL_VARIANTS[variant].kind.value, model=name, variant=variant,
                context=context, batch=1, kv_gpu_tokens=None, settings=settings)  # fmt: skip


def threads_of(args: argparse.Namespace, variant: str) -> int:
    """How many a variant computes with: as it would choose by itself."""
    engine = ALL_VARIANTS[variant]
    is_ours = engine.kind is Kind.AMBIDEX and engine.device == "cuda"
    takes_all = is_ours and args.threads == read_topology().num_usable_cores
    return max(1, args.threads - 1) if takes_all else int(args.threads)


def run_variant(args: argparse.Namespace, variant: str, model: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Answer the prompts in a process of their own: what it reports, or {"failed": reason}."""
    num_threads = threads_of(args, variant)
    job = Job(variant=variant, model_file=model, prompts=prompts, num_steps=args.steps, num_threads=num_threads,
              longest_wait_s=args.wait, chunk_len=args.chunk)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(asdict(job)))
        script = Path(__file__).resolve().parent.parent / "decode_engines.py"
        try:
            process = subprocess.run(
                [sys.executable, str(script), str(job_file), str(result_file)],
                stderr=subprocess.PIPE, text=True, errors="replace", check=False, timeout=args.timeout,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {args.timeout:g} s"}
        if process.returncode != 0:
            return {"failed": explain_exit(process.returncode, process.stderr)[:600]}
        return dict(json.loads(result_file.read_text()))


def make_figures(result: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one answer, laid out as those of `ambidex bench compare`."""
    took = Quantiles.of(answer["step_s"])
    steps = len(answer["step_s"])
    return {
        "step_s": took.record(),
        "tokens_per_s": significant(1 / took.median),
        "fill_s": significant(answer["prefill_s"]),
        "prefill_tokens_per_s": significant(answer["context"] / answer["prefill_s"]),
        "lane_bytes": {lane: size // steps for lane, size in answer["lane_bytes"].items()},
        "memory": result["memory"],
        "token_ids": answer["token_ids"],
        "others": answer["others"],
        "about": result["about"],
    }


def summarise(folder: ReportFolder, variants: Sequence[str]) -> int:
    """Print each variant beside the first; returns the exit code."""
    lines = [line for line in folder.lines() if line["cell"]["variant"] in variants]
    done = {(line["cell"]["context"], line["cell"]["variant"]): line["figures"] for line in lines
            if line["status"] == "done"}  # fmt: skip
    for (context, variant), figures in done.items():
        first = done.get((context, variants[0]))
        words = f"{variant:28} context {context:7}: {figures['step_s']['median'] * 1e3:9.3f} ms a step"
        if first is not None:
            equal = num_equal(first["token_ids"], figures["token_ids"])
            words += (
                f", {variants[0]} is {figures['step_s']['median'] / first['step_s']['median']:.2f} times as fast; "
                f"{equal} of {len(first['token_ids'])} tokens equal"
            )
        print(words)
    failed = [line for line in lines if line["status"] == "failed"]
    for line in failed:
        print(f"{line['cell']['variant']:28} context {line['cell']['context']:7}: failed: {line['reason']}")
    print(folder.path / "report.html")
    return 3 if failed else 0


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    pairs = [a == b for a, b in zip(first, second, strict=False)]
    return pairs.index(False) if False in pairs else len(pairs)


if __name__ == "__main__":
    sys.exit(main())
