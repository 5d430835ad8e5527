"""Throughput of this server and of llama.cpp at the same number of clients and threads, over one file, in one run.

    bench/peers.sh                      # once: an environment with llama.cpp and its Python server
    .venv/bin/python bench/serve_peers.py --peer .bench-venv/bin/python --record bench/results/serve_peers.jsonl

Two workloads: short prompts and long ones, each client's its own: no two begin alike. `tokens_per_s` are answered
tokens by the time from the first request to the last answer, prompts included. `decode_tokens_per_s` leave the prompts
out: here each client asks its prompt once more, and the server has its K and V; there the clock starts when all are
computed. Three contestants: this server; the server of llama-cpp-python, which answers one request at a time; and
llama.cpp without one (`llama_batch.py`), which computes all requests as one batch, as llama.cpp's own server does.

Long prompts take minutes. With `--keep FOLDER` they are left there (sessions; llama.cpp's state), and a second run
begins behind them: then `cached_tokens` is not 0, and only `decode_tokens_per_s` says something.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ambidex.formats.locate import find_model
from ambidex.text.tokenizer import load_tokenizer
from harness import append_record, environment, watch_others
from serve_load import TEXT

START_S = 180.0
NO_END = {"logit_bias": {"0": -100, "2": -100}}
"""SmolLM2's ends of text and of turn: every answer gets all its tokens, on either server."""


async def ask(port: int, prompt: str, num_tokens: int) -> tuple[int, int]:
    """One whole completion; the tokens that it has, and those of its prompt that the server had."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **NO_END}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    found = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    if "usage" not in found:
        raise RuntimeError(f"the server answers {found}")
    details = found["usage"].get("prompt_tokens_details") or {}
    return int(found["usage"]["completion_tokens"]), int(details.get("cached_tokens", 0))


async def measure(port: int, prompts: Sequence[str], num_tokens: int) -> tuple[float, int]:
    """Answered tokens per second, all prompts at once, and the tokens of prompts that the server had."""
    begun_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, prompt, num_tokens) for prompt in prompts))
    seconds = time.perf_counter() - begun_s
    if {count for count, _ in answers} != {num_tokens}:
        raise RuntimeError(f"answers have {sorted({count for count, _ in answers})} tokens, not {num_tokens}")
    return round(sum(count for count, _ in answers) / seconds, 2), sum(cached for _, cached in answers)


@contextmanager
def serving(command: Sequence[str], port: int, **variables: str) -> Iterator[None]:
    """A server in a process of its own, ready to answer."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            deadline = time.monotonic() + START_S
            while not asyncio.run(_answers(port)):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read()[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


async def _answers(port: int) -> bool:
    try:
        return (await ask(port, "x", 1))[0] == 1
    except (OSError, RuntimeError, ValueError):
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def make_prompts(num_clients: int, num_tokens: int) -> tuple[list[list[int]], list[str]]:
    """A prompt for each client, from a part of the text of its own, as token ids and as text."""
    tokenizer = load_tokenizer(find_model("smollm2"))
    share = len(TEXT) // num_clients
    prompts = []
    for idx in range(num_clients):
        ids = tokenizer.encode(TEXT[idx * share : idx * share + 8 * num_tokens])
        prompts.append(ids[:num_tokens])
    if len({tuple(ids[:16]) for ids in prompts}) < num_clients or min(map(len, prompts)) < num_tokens:
        raise SystemExit("the text has no prompts of that length that differ from their beginning on")
    return prompts, [tokenizer.decode(ids) for ids in prompts]


def own_server(args: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Any]:
    """This server's figures."""
    port = free_port()
    command = [sys.executable, "-c", "from ambidex.cli.main import run; run()", "serve", "smollm2", "--port", str(port)]
    if args.keep is not None:
        command += ["--session-dir", str(args.keep / "sessions"), "--session-quota", "64GiB"]
    with serving([*command, "--num-threads", str(args.threads), *args.serve], port):
        rate, num_cached = asyncio.run(measure(port, prompts, args.tokens))
        decode_rate, num_kept = asyncio.run(measure(port, prompts, args.tokens))
        if args.keep is not None:
            wait_saved(port)
    return {
        "tokens_per_s": rate,
        "cached_tokens": num_cached,
        "decode_tokens_per_s": decode_rate,
        "kept_tokens": num_kept,
    }


def wait_saved(port: int) -> None:
    """Wait until an idle server has written what it keeps."""
    counts = [-1]
    while len(counts) < 4 or counts[-1] != counts[-4]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/ambidex/cache", timeout=60) as answer:
            counts.append(json.load(answer)["num_saved_blocks"])
        time.sleep(0.5)


def peer_server(args: argparse.Namespace, file: str, prompts: Sequence[str]) -> dict[str, Any]:
    """Those of llama-cpp-python's server."""
    port, threads = free_port(), str(args.threads)
    command = [str(args.peer), "-m", "llama_cpp.server", "--model", file, "--port", str(port), "--n_ctx", "8192"]
    command += ["--n_threads", threads, "--n_threads_batch", threads, "--interrupt_requests", "false"]
    with serving(command, port):
        return {"tokens_per_s": asyncio.run(measure(port, prompts, args.tokens))[0]}


def peer_batch(args: argparse.Namespace, file: str, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Those of llama.cpp without a server."""
    state = None if args.keep is None else str(args.keep / f"llama-{len(ids)}-{len(ids[0])}.state")
    job = {"model": file, "prompts": ids, "tokens": args.tokens, "threads": args.threads, "state": state}
    script = str(Path(__file__).with_name("llama_batch.py"))
    out = subprocess.run([str(args.peer), script], input=json.dumps(job), capture_output=True, text=True, check=False)
    if out.returncode != 0:
        raise SystemExit(f"llama_batch.py failed:\n{out.stderr[-2000:]}")
    return {name: rate and round(rate, 2) for name, rate in json.loads(out.stdout).items()}


def main() -> None:
    """Run and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="Python with llama-cpp-python[server]")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 4096], help="of each client's prompt")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep computed prompts there, and begin behind them"
    )
    parser.add_argument("--skip", nargs="*", default=[], help="contestants: llama_cpp_server, llama_cpp_batch")
    parser.add_argument("--record", type=Path, help="append the JSON line to this file")
    parser.add_argument("serve", nargs="*", help="after --: flags of ambidex serve")
    args = parser.parse_args()
    file = str(find_model("smollm2").files[0])
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    results = []
    for num_tokens in args.prompt_tokens:
        ids, prompts = make_prompts(args.clients, num_tokens)
        found: dict[str, Any] = {"prompt_tokens": num_tokens, "context_tokens": num_tokens + args.tokens}
        contestants = {
            "ambidex": partial(own_server, args, prompts),
            "llama_cpp_server": partial(peer_server, args, file, prompts),
            "llama_cpp_batch": partial(peer_batch, args, file, ids),
        }
        for name, run in contestants.items():
            if name not in args.skip:
                with watch_others() as others:
                    figures = run()
                found[name] = {**figures, "others_busy_cores": others.busy_cores}
                print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
        results.append(found)
    version = [str(args.peer), "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    peer_version = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    record = {
        **environment(),
        "peer": f"llama-cpp-python {re.sub('[^0-9.]', '', peer_version)}",
        "clients": args.clients,
        "threads": args.threads,
        "tokens": args.tokens,
        "serve": args.serve,
        "begins_behind_kept_prompts": args.keep is not None,
        "workloads": results,
    }
    print(append_record(args.record, record) if args.record else json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
