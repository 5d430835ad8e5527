"""Many streaming clients at one server: are answers those of a solo run, is memory flat, how late do tokens come, and
what does the server itself cost for each token?

    .venv/bin/python bench/serve_load.py --clients 64 --seconds 600 -- smollm2 --kv-gpu-tokens 1600 --dram-memory 150MB

What follows `--` goes to `ambidex serve`. Each prompt is first asked alone; then the clients ask them again and again.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from harness import Quantiles, append_record, environment, watch_others

LARGE_BYTES = 32 * 2**20
"""Of an anonymous mapping: KV pools and weights are larger, what Python and malloc ask for is smaller."""
TEXT = " ".join(" ".join(topics[name] for name in sorted(topics)).split())


@dataclass(slots=True)
class Figures:
    """What the clients saw; seconds."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    """Tokens of prompts that the server had already."""
    num_cut: int = 0
    """Streams that had begun when the engine was killed."""
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def serving(args: Sequence[str]) -> Iterator[tuple[int, int]]:
    """A server in a process of its own; its pid and port."""
    command = [sys.executable, "-c", "from ambidex.cli.main import run; run()", "serve", *args, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True)
        try:
            match = None
            while match is None and process.poll() is None:
                time.sleep(0.2)
                log.seek(0)
                match = re.search(r"http://[^:]+:(\d+)", log.read())
            if match is None:
                raise SystemExit("the server did not start")
            yield process.pid, int(match[1])
        finally:
            process.terminate()
            code = process.wait(timeout=90)
            log.seek(0)
            print(f"exit code {code}; end of its log:", *log.readlines()[-3:], sep="\n", file=sys.stderr)


@dataclass(slots=True)
class Stream:
    """One streamed answer: its text, when pieces came, the server's counts of tokens, and the error, if any."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    error: str | None = None


async def ask(port: int, body: dict[str, Any]) -> Stream:
    """Ask and read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    usage = {"stream_options": {"include_usage": True}}
    data = json.dumps({**body, **usage, "stream": True, "temperature": 0}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    stream, error = Stream(times=[time.perf_counter()]), "the stream ended early"
    try:
        status = await reader.readline()
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    stream.error = event["error"]["message"]
                    return stream
                if event["usage"] is not None:
                    stream.num_tokens = event["usage"]["completion_tokens"]
                    stream.num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                    continue
                stream.text += event["choices"][0]["text"]
                stream.times.append(time.perf_counter())
            elif line.startswith(b"data: [DONE]"):
                error = ""
            elif line.startswith(b'{"error"'):
                error = line.decode()
        stream.error = f"{status.decode().strip()}: {error}" if error else None
        return stream
    finally:
        writer.close()


async def client(
    port: int, asks: list[dict[str, Any]], wanted: list[str], *, end_s: float, seed: int, to: Figures
) -> None:
    """Ask until the time is over."""
    rng = random.Random(seed)
    while time.perf_counter() < end_s:
        idx = rng.randrange(len(asks))
        stream = await ask(port, asks[idx])
        text, times = stream.text, stream.times
        to.num_answers += 1
        if stream.error is not None and "SIGKILL" in stream.error:
            to.num_cut += 1
        elif stream.error is not None and "is being built anew" in stream.error:
            await asyncio.sleep(0.5)
        elif stream.error is not None:
            to.errors.append(stream.error)
        elif text != wanted[idx]:
            to.wrong.append(f"prompt {idx}: {text!r} is not {wanted[idx]!r}")
        if len(times) > 1:
            to.first_s.append(times[1] - times[0])
            to.gaps_s += [after - before for before, after in itertools.pairwise(times[1:])]
            to.num_tokens += stream.num_tokens
            to.num_cached += stream.num_cached


def engine_of(pid: int) -> int:
    """The process of the server's engine."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def resident_by_mapping(pid: int) -> dict[str, int]:
    """Resident bytes of a process by what is mapped: files by name, large anonymous regions by address, the heap."""
    sizes: dict[str, int] = {}
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", words[0]):
            start, end = (int(word, 16) for word in words[0].split("-"))
            kind = "large" if end - start >= LARGE_BYTES else "small"
            name = words[5] if len(words) > 5 else f"{kind} anonymous"
        elif words[0] == "Rss:":
            sizes[name] = sizes.get(name, 0) + int(words[1]) * 1024
    return sizes


async def watch(pid: int, sizes: list[int]) -> None:
    """Note the resident bytes of server and engine each second."""
    while True:
        with contextlib.suppress(OSError, IndexError):  # the engine is being built anew
            pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in (pid, engine_of(pid))]
            sizes.append(sum(pages) * os.sysconf("SC_PAGE_SIZE"))
        await asyncio.sleep(1)


def cpu_s(stat: Path) -> float:
    """CPU seconds of a process or thread."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def overhead_s(pid: int, engine: int) -> dict[str, float]:
    """CPU seconds that an engine alone would not spend: of the server, and of the thread that speaks for the engine."""
    return {
        "server": cpu_s(Path(f"/proc/{pid}/stat")),
        "engine's messages": cpu_s(Path(f"/proc/{engine}/task/{engine}/stat")),
    }


async def is_ready(port: int) -> bool:
    """What `/ready` says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    status = await reader.readline()
    writer.close()
    return b" 200 " in status


async def kill_engine(pid: int, port: int, after_s: float) -> dict[str, float]:
    """Kill the engine's process; the seconds until it is ready again, and until a request that comes then has its
    answer, behind all that have waited."""
    await asyncio.sleep(after_s)
    os.kill(engine_of(pid), signal.SIGKILL)
    killed_s = time.perf_counter()
    while await is_ready(port):
        await asyncio.sleep(0.01)
    while not await is_ready(port):
        await asyncio.sleep(0.05)
    ready_s = time.perf_counter() - killed_s
    while (await ask(port, {"prompt": "x", "max_tokens": 1})).error is not None:
        await asyncio.sleep(0.05)
    return {"ready_s": round(ready_s, 2), "answered_s": round(time.perf_counter() - killed_s, 2)}


async def measure(args: argparse.Namespace, pid: int, port: int) -> dict[str, Any]:
    """The whole run."""
    rng = random.Random(1)
    asks = []
    for _ in range(args.prompts):
        start, length = rng.randrange(len(TEXT) - 10_000), rng.randint(*args.prompt_chars)
        asks.append({"prompt": TEXT[start : start + length], "max_tokens": args.tokens, "ignore_eos": True})
    while (await ask(port, {"prompt": "x", "max_tokens": 1})).error is not None:
        await asyncio.sleep(0.5)
    wanted = [(await ask(port, body)).text for body in asks]
    figures = Figures()
    sizes: list[int] = []
    engine = engine_of(pid)
    watcher = asyncio.create_task(watch(pid, sizes))
    before_s, begun_s = overhead_s(pid, engine), time.perf_counter()
    end_s = begun_s + args.seconds
    work = asyncio.gather(
        *(client(port, asks, wanted, end_s=end_s, seed=seed, to=figures) for seed in range(args.clients))
    )
    recovery = None if args.kill_after is None else await kill_engine(pid, port, args.kill_after)
    engine = engine_of(pid)
    await asyncio.sleep(args.seconds / 5 if recovery is None else 0)  # the middle of what counts as early below
    first = resident_by_mapping(engine)
    await work
    seconds, after_s = time.perf_counter() - begun_s, overhead_s(pid, engine)
    watcher.cancel()
    last = resident_by_mapping(engine)
    num_tokens = max(1, figures.num_tokens)
    grown = {name: size - first.get(name, 0) for name, size in last.items() if size > first.get(name, 0) + 2**18}
    tenth = max(1, len(sizes) // 10)
    early, late = statistics.median(sizes[tenth : 3 * tenth]), statistics.median(sizes[-2 * tenth :])
    gaps = sorted(figures.gaps_s)
    return {
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "serve": args.serve,
        "answers": figures.num_answers,
        "tokens": figures.num_tokens,
        "cached_prompt_tokens": figures.num_cached,
        "tokens_per_s": round(figures.num_tokens / seconds, 2),
        "errors": len(figures.errors),
        "wrong_answers": len(figures.wrong),
        "killed": None if recovery is None else {**recovery, "cut_streams": figures.num_cut},
        "examples": (figures.errors + figures.wrong)[:3],
        "first_token_s": Quantiles.of(figures.first_s).record(),
        "between_tokens_s": Quantiles.of(gaps).record(),
        "between_tokens_p99_s": round(gaps[int(0.99 * (len(gaps) - 1))], 4),
        "overhead_s_per_token": None
        if recovery is not None
        else {name: (after_s[name] - before_s[name]) / num_tokens for name in after_s},
        "resident_bytes_early": early,
        "resident_bytes_late": late,
        "resident_drift": round(late / early - 1, 4),
        "resident_grown_bytes": {  # names of files without their folders, which are this machine's
            Path(name).name: size for name, size in sorted(grown.items(), key=lambda item: -item[1])[:5]
        },
    }


def main() -> None:
    """Run and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--prompts", type=int, default=16, help="different prompts")
    parser.add_argument("--prompt-chars", type=int, nargs=2, default=(50, 1200), metavar=("FEW", "MANY"))
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--kill-after", type=float, help="kill -9 the engine's process after so many seconds")
    parser.add_argument("--record", type=Path, help="append the JSON line to this file")
    parser.add_argument("serve", nargs="+", help="after --: MODEL and flags of ambidex serve")
    args = parser.parse_args()
    with watch_others() as others, serving(args.serve) as (pid, port):
        record = asyncio.run(measure(args, pid, port))
    record = {**environment(), **record, "others_busy_cores": others.busy_cores}
    print(append_record(args.record, record) if args.record else json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
