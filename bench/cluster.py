"""A cluster beside one server: overhead, two replicas beside one, repeated audio, sessions in Redis.

    python bench/cluster.py --data DIR --parts overhead,replicas,affinity,sessions --json cluster.json

    overhead   files and live callers through a cluster of one replica and through `asr-serve serve`, in turns
    replicas   files on two replicas with a core each, and on one replica
    affinity   files that come again, with and without the cache that requests follow; two replicas
    sessions   a write to Redis and a takeover, beside the look-up in memory (bench/sessions.py)
README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import clips
import footprint
import live
import live_speech
import machine
import numpy as np
import offline
import serve
import serve_load
import serve_peers
import serve_report
from offline import say
from serve_peers import HOST, Service

PARTS = ("overhead", "replicas", "affinity", "sessions")
PACKAGES = (*serve.PACKAGES, "ray", "redis", "cryptography")
SEED = 20_26
WARM_UP_CLIENTS = 4
SCALE_S = 180.0
COMMAND = footprint.COMMAND[:-1]
Row = dict[str, Any]
Cores = dict[str, float]
"""Processor time of a level, in cores in use, by what used it."""


class Running(NamedTuple):
    """A server, or a cluster with its ingress."""

    port: int
    pid: int
    ray: str = ""
    """Address of its Ray; empty: a plain server."""


class Bench:
    """Settings of a run, and its speech."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.speech = clips.load(args.data, args.clips)
        self.files = [serve.write_wav(folder / f"{place:04d}.wav", clip) for place, clip in enumerate(self.speech)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("ASR_SERVE_", "RAY_"))}
        ray = {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": args.ray_folder, "RAY_raylet_start_wait_time_s": "120"}
        self.env = {**environ, **thread_counts(args.threads), **ray}
        self.run = serve.Run(args, self.speech, self.files, self.env, folder)

    @contextmanager
    def plain(self) -> Iterator[Running]:
        """`asr-serve serve`, which remembers nothing."""
        port = serve.free_port()
        extra = ["--model", self.args.model, "--set", "turn_model=none"]
        service = serve_peers.asr_serve(serve_peers.Setting(port, self.args.threads, self.folder, extra))
        with self._started(service, port) as pid:
            yield Running(port, pid)

    @contextmanager
    def cluster(self, replicas: int, threads: int, *, prefix_bytes: int | None = 0) -> Iterator[Running]:
        """`asr-serve cluster up`. `prefix_bytes`: of the engines' cache; None: the default."""
        port = serve.free_port()
        engine = {} if prefix_bytes is None else {"prefix_bytes": prefix_bytes}
        settings = {
            "models": [{"model": self.args.model, "replicas": replicas, "cpus": 1, "threads": threads}],
            "serve": {"host": HOST, "port": port, "turn_model": "none", "drain_s": 2, "engine": engine},
        }
        config = self.folder / "cluster.yaml"
        config.write_text(json.dumps(settings))  # JSON is YAML
        command = [*COMMAND, "cluster", "up", "--config", str(config), "--cpus", "2"]
        with self._started(Service(command, "/ready", self.args.model, ""), port) as pid:
            yield Running(port, pid, self._ray())

    @contextmanager
    def _started(self, service: Service, port: int) -> Iterator[int]:
        with serve.started(service, port, self.run) as (process, trouble):
            if trouble:
                raise SystemExit(f"{' '.join(service.command[3:])}: {trouble}")
            yield process.pid

    def _ray(self) -> str:
        """Address of the Ray that a cluster told of once it was ready."""
        until_s = time.monotonic() + SCALE_S
        while (found := re.search(r"of Ray at ([^\s)]+)", (self.folder / "server.log").read_text())) is None:
            if time.monotonic() > until_s:
                raise SystemExit("the cluster did not tell the address of its Ray")
            time.sleep(0.1)
        return found[1]

    def control(self, running: Running, *arguments: str) -> str:
        """Output of `asr-serve cluster ...`."""
        done = subprocess.run(
            [*COMMAND, "cluster", *arguments, "--address", running.ray],
            capture_output=True,
            text=True,
            env=self.env,
            timeout=SCALE_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"asr-serve cluster {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    # --- loads -----------------------------------------------------------------------------------------

    def upload(self, running: Running, clients: int, files: Sequence[Path], lengths_s: Sequence[float]) -> Row:
        """Clients that each wait for an answer before they send the next file."""
        load = {
            "host": HOST,
            "port": running.port,
            "path": "/v1/audio/transcriptions",
            "files": [str(file) for file in files],
            "fields": {"model": self.args.model, "response_format": "json"},
            "seed": SEED,
            "limit_s": self.args.limit_s,
            "pid": running.pid,
        }
        warm_up = {"clients": WARM_UP_CLIENTS, "seconds": 1, "requests": 1, "per_client": 1}
        enough = {"clients": clients, "seconds": self.args.seconds, "requests": self.args.requests, "per_client": 1}
        found = serve.generate({**load, **warm_up}, self.folder)
        if "failed" not in found:
            watch = Watch(running.pid)
            found = serve.generate({**load, **enough}, self.folder)
            used = watch.cores()
        if "failed" in found:
            return {"failed": found["failed"]}
        made = serve_report.facts(found, lengths_s)
        refused = made["errors"].pop("429", 0)  # a client that is refused tries again
        used["load"] = found["client_cpu_s"] / found["wall_s"]
        return {
            "callers": clients,
            "rtfx": made["rtfx"],
            "cpu_ms_per_audio_s": round(1_000 * found["server_cpu_s"] / found["wall_s"] / max(made["rtfx"], 1e-9), 2),
            "p50_ms": made["p50_ms"],
            "p95_ms": made["p95_ms"],
            "lost": sum(made["errors"].values()),
            "refused": refused,
            "requests": made["requests"],
            "cores": rounded(used),
        }

    def speak(self, running: Running, callers: int, calls: live.Bench) -> Row:
        """Live callers; times are those of finals, from the audio that decides the end of a sentence."""
        job = {
            "url": f"ws://{HOST}:{running.port}",
            "grace_s": live.GRACE_S,
            "silence_ms": self.args.silence_ms,
            "at_once": False,
            "retry": False,
            "protocol": "funasr",
            "pid": running.pid,
        }
        for count, seconds in ((min(4, callers), 0.0), (callers, self.args.live_seconds)):
            chosen = calls.callers(count, seconds)
            watch = Watch(running.pid)
            found = calls.work("live_load.py", {**job, "callers": chosen, "seconds": seconds})
            used = watch.cores()
            if "failed" in found:
                return {"failed": found["failed"]}
        made = calls.row(live.OURS, chosen, found)
        used["load"] = found["load_cpu"]
        return {
            "callers": callers,
            "rtfx": round(made["audio_s"] / found["wall_s"], 2),
            "p50_ms": made["final_p50_ms"],
            "p95_ms": made["final_p95_ms"],
            "lost": made["misses"]["lost_sessions"],
            "first_word_p50_ms": made["first_word_p50_ms"],
            "finals_ms": finals_ms(chosen, found, self.args.silence_ms),
            "requests": made["sentences"],
            "cores": rounded(used),
        }


def finals_ms(callers: Sequence[live_speech.Caller], found: Row, silence_ms: int) -> list[float]:
    """Every final's time."""
    from live_calls import Call

    waits: list[float] = []
    for caller, heard in zip(callers, found["callers"], strict=True):
        windows = live_speech.windows(caller.samples)
        call = Call(caller, np.zeros(windows, np.bool_), heard, silence_ms)
        waits += [round(final[0], 1) for final in call.finals_ms(0.0) if final is not None]
    return waits


# --- processor time, and cores -----------------------------------------------------------------------------


class Watch:
    """Processor time of a server's processes since it was made."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began_s, self._before = pid, time.monotonic(), processor_s(pid)

    def cores(self) -> Cores:
        """Cores in use, by kind of process. What a process that is gone used is missing."""
        wall_s = time.monotonic() - self._began_s
        after = processor_s(self._pid)
        used: dict[str, float] = defaultdict(float)
        for pid, (kind, seconds) in after.items():
            used[kind] += (seconds - self._before.get(pid, (kind, 0.0))[1]) / wall_s
        return dict(used)


def processor_s(root: int) -> dict[int, tuple[str, float]]:
    """Kind and processor seconds of each process below a server."""
    found = {}
    for pid in serve_load.tree(root):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            found[pid] = kind_of(line, pid == root), sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return found


def kind_of(line: str, is_root: bool) -> str:
    """What a process of a server is for, by its command line."""
    if "engine.process.main" in line:
        return "engines"
    if "ingress" in line and "ray::" in line:
        return "ingress"
    if "cluster up" in line or "ray" in line.lower():
        return "ray"
    return "ingress" if is_root else "other"


def engines(running: Running) -> list[int]:
    return sorted(pid for pid, (kind, _) in processor_s(running.pid).items() if kind == "engines")


def pin(pid: int, cores: Sequence[int]) -> None:
    """Pins all threads of a process."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):
            os.sched_setaffinity(int(task), cores)


def rounded(used: Cores) -> Cores:
    return {kind: round(cores, 3) for kind, cores in sorted(used.items())}


def thread_counts(threads: int) -> dict[str, str]:
    """Environment of servers, without what names others' threads."""
    return {
        name: value
        for name, value in offline.environment(threads).items()
        if name.endswith("_THREADS") or name in ("PYTHONPATH", "HF_HUB_OFFLINE", "PYTHONUNBUFFERED")
    }


# --- parts ---------------------------------------------------------------------------------------------------


def overhead(bench: Bench) -> list[Row]:
    """Each server in its own lives, in turns: while one is measured, the other is not there."""
    args = bench.args
    calls = live.Bench(
        live.parse(["--data", str(args.data), "--model", args.model, "--silence-ms", str(args.silence_ms)]),
        bench.folder,
    )
    found: dict[tuple[str, str], list[Row]] = {}
    for number in range(args.repeats):
        for system in ("serve", "cluster"):
            say(f"overhead {number + 1}/{args.repeats}: {system}")
            with bench.plain() if system == "serve" else bench.cluster(1, args.threads) as running:
                idle = Watch(running.pid)
                time.sleep(args.idle_seconds)
                used = rounded(idle.cores())
                for load, row in (
                    ("files", bench.upload(running, args.clients, bench.files, bench.run.lengths_s)),
                    ("live", bench.speak(running, args.callers, calls)),
                ):
                    say(f"    {load}: {json.dumps({key: row[key] for key in row if key != 'finals_ms'})}")
                    found.setdefault((system, load), []).append({**row, "idle_cores": used})
    rows = [
        {"part": "overhead", "system": system, "load": load, "replicas": 1, **median(rounds)}
        for (system, load), rounds in found.items()
    ]
    by_name = {(row["system"], row["load"]): row for row in rows}
    files, speech = by_name["cluster", "files"], by_name["cluster", "live"]
    if "failed" not in files and "failed" not in by_name["serve", "files"]:
        files["rtfx_over_serve"] = ratio(files, by_name["serve", "files"])
    if "failed" not in speech and "failed" not in by_name["serve", "live"]:
        speech["p50_ms_more"] = round(speech["p50_ms"] - by_name["serve", "live"]["p50_ms"], 1)
    return rows


def replicas(bench: Bench) -> list[Row]:
    """One cluster, scaled between one replica and two. `one core`: of everything, load generator included, as the pair
    has both cores for everything; `one core, rest beside it`: the engine alone has its core."""
    args = bench.args
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return [{"part": "replicas", "replicas": 2, "failed": "this process may use one core only"}]
    found: dict[str, list[Row]] = {}
    with bench.cluster(1, 1) as running:
        for number in range(args.repeats):
            for layout, count in (("one core", 1), ("one core, rest beside it", 1), ("a core each", 2)):
                if len(engines(running)) != count:
                    bench.control(running, "scale", args.model, str(count))
                rest = {"one core": cores[:1], "one core, rest beside it": cores[1:]}.get(layout, cores)
                with pinned(running, cores, rest):
                    row = bench.upload(running, args.clients * count, bench.files, bench.run.lengths_s)
                say(f"replicas {number + 1}/{args.repeats}: {layout}: {json.dumps(row)}")
                found.setdefault(layout, []).append({**row, "replicas": count})
    rows: list[Row] = [{"part": "replicas", "layout": layout, **median(rounds)} for layout, rounds in found.items()]
    pair = rows[-1]
    for row in rows[:-1]:
        if "failed" not in row and "failed" not in pair:
            pair[f"rtfx_over_{row['layout'].replace(', ', ' ').replace(' ', '_')}"] = ratio(pair, row)
    return rows


@contextmanager
def pinned(running: Running, cores: Sequence[int], rest: Sequence[int]) -> Iterator[None]:
    """Each engine on a core of its own; the other processes, and this one with what it starts, on `rest`."""
    own = os.sched_getaffinity(0)
    each = engines(running)
    for pid in serve_load.tree(running.pid):
        with suppress(OSError):
            pin(pid, [cores[each.index(pid) % len(cores)]] if pid in each else rest)
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
        for pid in serve_load.tree(running.pid):
            with suppress(OSError):
                pin(pid, sorted(own))


def affinity(bench: Bench) -> list[Row]:
    """Two replicas; half of the requests are for a tenth of the recordings."""
    args = bench.args
    files, lengths_s = repeated_files(bench)
    found: dict[str, list[Row]] = {}
    for number in range(args.repeats):
        for cache in ("off", "on"):
            with bench.cluster(2, 1, prefix_bytes=0 if cache == "off" else None) as running:
                before = counts(bench, running)
                row = bench.upload(running, 2 * args.clients, files, lengths_s)
                after = counts(bench, running)
            asked = sum(after[kind] - before[kind] for kind in ("answer", "audio", "none"))
            hits = asked - (after["none"] - before["none"])
            row |= {"hit_rate": round(hits / asked, 3) if asked else 0.0}
            row |= {"routed_to_holder": after["routed"] - before["routed"], "segments": asked}
            say(f"affinity {number + 1}/{args.repeats}: {cache}: {json.dumps(row)}")
            found.setdefault(cache, []).append({**row, "replicas": 2})
    rows: list[Row] = [{"part": "affinity", "cache": cache, **median(rounds)} for cache, rounds in found.items()]
    if all("failed" not in row for row in rows):
        rows[1]["rtfx_over_off"] = ratio(rows[1], rows[0])
    return rows


def repeated_files(bench: Bench) -> tuple[list[Path], list[float]]:
    """Recordings for a workload that repeats: of two halves of the requests one is for popular recordings, the other
    for variants of all of them, which sound the same and are new to a cache."""
    popular = max(1, len(bench.files) // 10)
    files, lengths = [], []
    chance = np.random.default_rng(SEED)
    for variant in range(bench.args.variants):
        for place, clip in enumerate(bench.speech):
            noise = 1e-4 * chance.standard_normal(len(clip.audio)).astype(np.float32)
            changed = clip._replace(audio=clip.audio + noise)
            path = bench.folder / f"v{variant}-{place:04d}.wav"
            files += [serve.write_wav(path, changed), bench.files[place % popular]]
            lengths += [len(clip.audio) / clips.RATE_HZ, len(bench.speech[place % popular].audio) / clips.RATE_HZ]
    return files, lengths


def counts(bench: Bench, running: Running) -> Counter[str]:
    """Segments so far by what the caches had of them, and those that were sent to who had them."""
    with urllib.request.urlopen(f"http://{HOST}:{running.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for labels, value in re.findall(r"^asr_serve_prefix_requests_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        kind = next(kind for kind in ("answer", "audio", "none") if f'"{kind}"' in labels)
        found[kind] += round(float(value))
    status = json.loads(bench.control(running, "status", "--json"))
    found["routed"] = sum(each["detail"].get("audio_hits", 0) for each in status)
    return found


def sessions(bench: Bench) -> list[Row]:
    """Rows of bench/sessions.py."""
    import sessions as redis_sessions

    return [{"part": "sessions", **row} for row in redis_sessions.measure_all(bench.args.session_repeats)]


def median(rounds: Sequence[Row]) -> Row:
    """The round with the median speed, or of live callers the pooled percentiles; what was lost is the sum."""
    for row in rounds:
        if "failed" in row:
            return row
    ordered = sorted(rounds, key=lambda row: row["rtfx"])
    made = {**ordered[(len(rounds) - 1) // 2], "lost": sum(row["lost"] for row in rounds)}
    made["rtfx_rounds"] = [row["rtfx"] for row in rounds]
    made["p50_ms_rounds"] = [row["p50_ms"] for row in rounds]
    if "finals_ms" in made:
        pooled = sorted(wait for row in rounds for wait in row["finals_ms"])
        del made["finals_ms"]
        made |= {f"p{share}_ms": serve_report.percentile(pooled, share / 100) for share in (50, 95)}
        made["finals"] = len(pooled)
    return made


def ratio(row: Row, base: Row) -> float:
    """Ratio of speeds: the median of the ratios of the rounds, which follow each other."""
    pairs = zip(row["rtfx_rounds"], base["rtfx_rounds"], strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 3)


def measure(args: argparse.Namespace, folder: Path) -> Row:
    from asr_serve.cluster import require_ray

    if set(args.parts) - {"sessions"}:
        require_ray()
    bench = Bench(args, folder)
    about: dict[str, Any] = machine.describe(args.threads)
    about["packages"] |= {name: version for name in PACKAGES if (version := machine.installed(name))}
    work = {"overhead": overhead, "replicas": replicas, "affinity": affinity, "sessions": sessions}
    chosen = {key: getattr(args, key) for key in ("model", "clients", "callers", "seconds", "live_seconds", "repeats")}
    found: Row = {"bench": "cluster", "machine": about, "settings": chosen, "rows": []}
    names = ("replicas", "callers", "rtfx", "p95_ms", "lost")
    for part in args.parts:
        found["rows"] += [{"name": "asr-serve", **dict.fromkeys(names), **row} for row in work[part](bench)]
        machine.write(args.json, found)  # a later part may be cut short
    return found


def table(rows: Sequence[Row]) -> str:
    """For people: one line a row."""
    keys = ("part", "which", "replicas", "callers", "rtfx", "p50_ms", "p95_ms", "lost", "cores")
    lines = [list(keys)]
    for row in rows:
        which = [str(row[key]) for key in ("system", "load", "layout", "cache", "store", "operation") if row.get(key)]
        if "p50_us" in row:
            row = {**row, "p50_ms": row["p50_us"] / 1_000, "p95_ms": row["p95_us"] / 1_000}
        if "failed" in row:
            lines.append([row["part"], " ".join(which), f"failed: {row['failed']}"] + [""] * (len(keys) - 3))
            continue
        cores = " ".join(f"{kind} {used}" for kind, used in row.get("cores", {}).items())
        lines.append(
            [row["part"], " ".join(which), *("" if row.get(k) is None else str(row[k]) for k in keys[2:-1]), cores]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(keys))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """1 when a part failed, 2 when something is missing that it needs."""
    from asr_serve.errors import AsrServeError

    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="r-") as args.ray_folder, tempfile.TemporaryDirectory() as name:
        try:
            found = measure(args, Path(name))
        except AsrServeError as missing:
            print(f"{missing}", file=sys.stderr)
            return 2
    print(table(found["rows"]))
    return int(any("failed" in row for row in found["rows"]))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--parts", type=parts, default=list(PARTS), metavar="A,B", help=f"any of {','.join(PARTS)} (all)")
    add("--model", default="moonshine-tiny-en", metavar="NAME", help="model (moonshine-tiny-en)")
    add("--clients", type=int, default=8, metavar="N", help="uploads at once for each replica (8)")
    add("--callers", type=int, default=8, metavar="N", help="live callers (8)")
    add("--seconds", type=float, default=10.0, metavar="S", help="length of a level of uploads (10)")
    add("--requests", type=int, default=100, metavar="N", help="and at least so many answers (100)")
    add("--live-seconds", type=float, default=20.0, metavar="S", help="how long each caller speaks, about (20)")
    add("--idle-seconds", type=float, default=2.0, metavar="S", help="an idle server is watched for so long (2)")
    add("--silence-ms", type=int, default=800, metavar="MS", help="the pause that ends a live sentence (800)")
    add("--repeats", type=int, default=2, metavar="N", help="rounds (2)")
    add("--session-repeats", type=int, default=1_000, metavar="N", help="writes and takeovers in Redis (1000)")
    add("--variants", type=int, default=4, metavar="N", help="new recordings of each clip, for affinity (4)")
    add("--clips", type=int, metavar="N", help="only N clips, spread evenly over the set")
    add("--threads", type=int, default=machine.cores(), metavar="N", help="of the engines for overhead (all cores)")
    add("--limit-s", type=float, default=600, metavar="S", help="longest a level may take (600)")
    add("--json", type=Path, metavar="FILE", help="where the result goes; without it only the table is printed")
    args = parser.parse_args(argv)
    for name in (
        "clients",
        "callers",
        "seconds",
        "live_seconds",
        "repeats",
        "session_repeats",
        "variants",
        "threads",
        "requests",
    ):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return args


def parts(text: str) -> list[str]:
    """`overhead,affinity` for argparse."""
    found = text.split(",")
    for part in found:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r}: any of {','.join(PARTS)}")
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.path.insert(0, str(serve.HERE.parent / "src"))
    sys.exit(main())
