"""Throughput of this server and of llama.cpp at the same number of clients and threads, over one file, in one run.

    bench/peers.sh                      # once: an environment with llama.cpp and its Python server
    .venv/bin/python bench/serve_peers.py --peer .bench-venv/bin/python --record bench/results/serve_peers.jsonl

Two workloads: prompts of their own at a short context, and prompts behind one long text that all have in common. That
text is asked once before the clock starts. Both servers keep it, each in its way. Three contestants: this server; the
server of llama-cpp-python, which answers one request at a time; and llama.cpp without one (`llama_batch.py`), which
computes all requests as one batch, as llama.cpp's own server does.
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
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


async def ask(port: int, prompt: str, num_tokens: int) -> int:
    """One whole completion; the tokens that it has."""
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
    return int(found["usage"]["completion_tokens"])


async def measure(port: int, prompts: Sequence[str], common: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Answered tokens per second, all prompts at once."""
    if common:
        await ask(port, common, 1)
    rates = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        counts = await asyncio.gather(*(ask(port, prompt, num_tokens) for prompt in prompts))
        seconds = time.perf_counter() - begun_s
        if set(counts) != {num_tokens}:
            raise RuntimeError(f"answers have {sorted(set(counts))} tokens: {num_tokens} were asked for")
        rates.append(sum(counts) / seconds)
    return {"tokens_per_s": round(statistics.median(rates), 2), "all": [round(rate, 2) for rate in rates]}


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
        return await ask(port, "x", 1) == 1
    except (OSError, RuntimeError, ValueError):
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def make_prompts(args: argparse.Namespace, num_common: int) -> tuple[list[str], str]:
    """Prompts, and the text that they have in common."""
    rng = random.Random(7)
    common = TEXT[: num_common * 4]
    chars = 4 * args.prompt_tokens
    starts = [rng.randrange(len(common), len(TEXT) - chars) for _ in range(args.clients)]
    return [common + TEXT[start : start + chars] for start in starts], common


def own_server(args: argparse.Namespace, prompts: Sequence[str], common: str) -> dict[str, Any]:
    """This server's figures."""
    port = free_port()
    command = [sys.executable, "-c", "from ambidex.cli.main import run; run()", "serve", "smollm2", "--port", str(port)]
    with serving([*command, "--num-threads", str(args.threads), *args.serve], port):
        return asyncio.run(measure(port, prompts, common, args.tokens, args.repeats))


def peer_server(args: argparse.Namespace, file: str, prompts: Sequence[str], common: str) -> dict[str, Any]:
    """Those of llama-cpp-python's server."""
    port, threads = free_port(), str(args.threads)
    command = [str(args.peer), "-m", "llama_cpp.server", "--model", file, "--port", str(port), "--n_ctx", "8192"]
    command += ["--n_threads", threads, "--n_threads_batch", threads, "--interrupt_requests", "false"]
    with serving(command, port):
        return asyncio.run(measure(port, prompts, common, args.tokens, args.repeats))


def peer_batch(args: argparse.Namespace, file: str, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Those of llama.cpp without a server."""
    job = {"model": file, "prompts": ids, "tokens": args.tokens, "threads": args.threads}
    script = str(Path(__file__).with_name("llama_batch.py"))
    out = subprocess.run([str(args.peer), script], input=json.dumps(job), capture_output=True, text=True, check=False)
    if out.returncode != 0:
        raise SystemExit(f"llama_batch.py failed:\n{out.stderr[-2000:]}")
    return {name: round(rate, 2) for name, rate in json.loads(out.stdout).items()}


def main() -> None:
    """Run and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="Python with llama-cpp-python[server]")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt of its own, about")
    parser.add_argument("--common-tokens", type=int, nargs="+", default=[0, 4096], help="before it, about")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--skip", nargs="*", default=[], help="contestants: llama_cpp_server, llama_cpp_batch")
    parser.add_argument("--record", type=Path, help="append the JSON line to this file")
    parser.add_argument("serve", nargs="*", help="after --: flags of ambidex serve")
    args = parser.parse_args()
    file = str(find_model("smollm2").files[0])
    tokenizer = load_tokenizer(find_model("smollm2"))
    results = []
    for num_common in args.common_tokens:
        prompts, common = make_prompts(args, num_common)
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        found: dict[str, Any] = {"context_tokens": max(map(len, ids)) + args.tokens}
        contestants = {
            "ambidex": partial(own_server, args, prompts, common),
            "llama_cpp_server": partial(peer_server, args, file, prompts, common),
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
        "workloads": results,
    }
    print(append_record(args.record, record) if args.record else json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
