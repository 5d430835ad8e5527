"""How fast is decode with one request on this CPU, against llama.cpp and transformers, and against what memory allows?

    bench/peers.sh && .bench-venv/bin/python bench/decode_cpu.py

Greedy answers of SmolLM2-135M at several contexts, batch 1, all cores, real text. Each engine runs in its own process,
one after another, after a short answer that is not counted. Prints speeds, floors and ratios and appends one JSON line
to bench/results/decode_cpu.jsonl. Exit code 1: an engine failed (the others are recorded); 2: something is missing.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ambidex.compare.watch import explain_exit
from ambidex.core.errors import CallerError, ConfigError
from ambidex.formats.locate import ModelSource, SourceKind, find_model
from ambidex.formats.spec import read_spec
from ambidex.hw.topology import read_topology
from ambidex.text.tokenizer import load_tokenizer
from decode_engines import BLOCK_SIZE, NUM_SINK_TOKENS, RECENT_WINDOW, VARIANTS, Job, Kind
from decode_figures import Outcome, make_points, make_ratios, print_tables
from harness import (
    REPO,
    append_record,
    environment,
    probe_bytes,
    read_bandwidth,
    significant,
    wait_until_quiet,
    watch_others,
)

PEER_PACKAGES: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.AMBIDEX: (),
    Kind.LLAMA_CPP: ("llama_cpp",),
    Kind.TRANSFORMERS: ("transformers", "accelerate"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    model: str
    text: Path | None
    contexts: tuple[int, ...]
    steps: int
    rounds: int
    variants: tuple[str, ...]
    threads: int
    wait: float
    skip_missing: bool
    output: Path


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    missing = find_missing(options.variants)
    for name, packages in missing.items():
        print(f"{name}: {' and '.join(packages)} not installed: run bench/peers.sh and use .bench-venv/bin/python, "
              "or leave it out with --skip-missing", file=sys.stderr)  # fmt: skip
    if missing and not options.skip_missing:
        return 2
    try:
        source = find_gguf(options.model)
        text_name, prompts = make_prompts(options, source)
    except CallerError as error:
        print(error, file=sys.stderr)
        return 2

    variants = [name for name in options.variants if name not in missing]
    opening = environment()  # as it is before the run, which takes long
    probes = [probe(options, "before")]
    outcomes = {name: Outcome({}, {context: [] for context in options.contexts}) for name in variants}
    for round_idx in range(options.rounds):
        for name in variants:
            print(f"round {round_idx + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            run_variant(name, outcomes[name], options, source=source, prompts=prompts)
    probes.append(probe(options, "after"))

    points = make_points(
        outcomes, read_spec(source), source, bytes_per_s=max(p["all_threads"]["median"] for p in probes)
    )
    ratios = make_ratios(points)
    failed = {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure}
    record = {"bench": "decode_cpu", **opening, "settings": settings(options, source, text_name, prompts),
              "read_bandwidth": probes, "points": points, "ratios": ratios,
              "about": {name: outcome.about for name, outcome in outcomes.items()},
              "missing": missing, "failed": failed}  # fmt: skip
    print_tables(record)
    print(append_record(options.output, record))
    return 1 if failed else 0


def parse_options() -> Options:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--model", default="smollm2", help="smollm2 or a .gguf file")
    parser.add_argument("--text", type=Path, help="file with the prompt; default: the help topics in Python's library")
    parser.add_argument("--contexts", default="512,2048,7500", help="tokens of the prompts")
    parser.add_argument("--steps", type=int, default=64, help="decode steps after each prompt")
    parser.add_argument("--rounds", type=int, default=1, help="times that every engine is run")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="what to run, in this order")
    parser.add_argument("--threads", type=int, default=read_topology().num_usable_cores, help="of every engine")
    parser.add_argument("--wait", type=float, default=60, help="longest wait for a quiet machine, seconds a prompt")
    parser.add_argument("--skip-missing", action="store_true", help="run without the peers that are not installed")
    parser.add_argument("--output", type=Path, default=REPO / "bench/results/decode_cpu.jsonl", help="gets a line")
    args = parser.parse_args()
    variants = tuple(args.variants.split(","))
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants {','.join(unknown)}: known are {','.join(VARIANTS)}")
    try:
        contexts = tuple(sorted({int(word) for word in args.contexts.split(",")}))
    except ValueError:
        parser.error(f"--contexts {args.contexts}: give numbers of tokens, as in 512,2048")
    if min(*contexts, args.steps, args.rounds, args.threads) < 1:
        parser.error("contexts, --steps, --rounds and --threads must be at least 1")
    return Options(**{**vars(args), "variants": variants, "contexts": contexts})


def find_missing(variants: Sequence[str]) -> dict[str, list[str]]:
    """For each variant that cannot run here, the modules that it lacks."""
    lacks = {
        name: [module for module in PEER_PACKAGES[VARIANTS[name].kind] if importlib.util.find_spec(module) is None]
        for name in variants
    }
    return {name: modules for name, modules in lacks.items() if modules}


def find_gguf(model: str) -> ModelSource:
    """The model's file; a GGUF, because that is what all three engines read.

    Raises:
        ModelError: there is no such model.
        ConfigError: it is no GGUF file.
    """
    source = find_model(model)
    if source.kind is not SourceKind.GGUF:
        raise ConfigError(f"--model {model} is {source.kind}: give a .gguf file, the only kind that llama.cpp reads")
    return source


def make_prompts(options: Options, source: ModelSource) -> tuple[str, list[list[int]]]:
    """The name of the text, and its first tokens for each context.

    Raises:
        ConfigError: the text cannot be read or is too short.
    """
    if options.text is None:
        name, text = "pydoc_data.topics", "\n\n".join(pydoc_data.topics.topics.values())
    else:
        name = options.text.name
        try:
            text = options.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {options.text} cannot be read as UTF-8 text: {error}") from error
    longest = max(options.contexts)
    ids = load_tokenizer(source).encode(
        text[: 16 * longest], add_special=False
    )  # English has 4 to 5 characters a token
    if len(ids) < longest:
        raise ConfigError(f"{name} has {len(ids)} tokens: the longest of --contexts is {longest}")
    return name, [ids[:context] for context in options.contexts]


def probe(options: Options, when: str) -> dict[str, Any]:
    """What memory delivers, with one thread and with all."""
    num_bytes = probe_bytes()
    wait_until_quiet(longest_s=options.wait)
    with watch_others() as others:
        one = read_bandwidth(num_threads=1, num_bytes=num_bytes)
        every = read_bandwidth(num_threads=options.threads, num_bytes=num_bytes)
    return {"when": when, "unit": "bytes/s", "buffer_bytes": num_bytes, "one_thread": one.record(),
            "all_threads": every.record(), "others": asdict(others)}  # fmt: skip


def run_variant(
    name: str, outcome: Outcome, options: Options, *, source: ModelSource, prompts: list[list[int]]
) -> None:
    """Run a variant in a process of its own and add its answers; a variant that failed is not run again."""
    if outcome.failure:
        return
    job = Job(
        variant=name,
        model_file=str(source.files[0]),
        prompts=prompts,
        num_steps=options.steps,
        num_threads=options.threads,
        longest_wait_s=options.wait,
    )
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(asdict(job)))
        script = Path(__file__).with_name("decode_engines.py")
        process = subprocess.run(
            [sys.executable, str(script), str(job_file), str(result_file)],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.threads)},
        )
        if process.returncode != 0:
            outcome.failure = explain_exit(process.returncode, process.stderr)
            print(f"{name} failed: {process.stderr[-4000:]}", file=sys.stderr)
            return
        result = json.loads(result_file.read_text())
    outcome.about = {**result["about"], "load_s": significant(result["load_s"], 3)}
    for answer in result["answers"]:
        outcome.answers[answer["context"]].append(answer)


def settings(options: Options, source: ModelSource, text_name: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What was run, for the record."""
    return {
        "model": source.files[0].name,
        "text": text_name,
        "token_ids_sha256": hashlib.sha256(json.dumps(prompts[-1]).encode()).hexdigest(),
        "contexts": list(options.contexts),
        "steps": options.steps,
        "rounds": options.rounds,
        "threads": options.threads,
        "warmup": "one answer of 4 tokens to 64 tokens, in each process",
        "block_size": BLOCK_SIZE,
        "split": {"num_sink_tokens": NUM_SINK_TOKENS, "recent_window": RECENT_WINDOW},
    }


if __name__ == "__main__":
    sys.exit(main())
