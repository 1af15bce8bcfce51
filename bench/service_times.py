"""Service times of this machine, for `asr-serve plan`: what each step costs, fitted to steps of real engines.

    python bench/service_times.py --data DIR --machine NAME --output NAME.json --json report.json

Each model runs in an engine in a process of its own, on one thread pinned to one core, under bursts of several sizes
and lengths. A step counts with the processor time of the engine's thread since the step before, so that the loop's own
work counts and other work on the machine does not; of equal steps the median. A line (fixed, per row, per second of
audio) is fitted by least squares of the relative error, with no negative part. The work of the server is processor
time of real servers. README.md says more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import clips
import live_finals
import live_speech
import machine
import numpy as np
import serve_load
from clips import RATE_HZ, Audio
from serve import free_port, wait_ready

HOST = "127.0.0.1"
LENGTHS_S = (1.5, 4.0, 9.0)
BURSTS = (1, 2, 4, 8, 16)
STREAMS = (1, 2, 4, 8, 16, 32)
SENTENCES = (
    "Yes.",
    "Thank you for calling.",
    "Your order was sent this morning and should be with you by Friday.",
    "If you would like to speak to somebody about your account, please stay on the line, and the next free colleague "
    "will be with you in a moment.",
)
LIVE_CALLERS, LIVE_S, FILES = 10, 8.0, 12
PATH_CLIPS, SILENCE_MS = 6, 800
Steps = dict[str, list[tuple[float, float, float]]]
"""Stage -> (rows, seconds of audio, seconds) of each step."""


def fit(steps: Sequence[tuple[float, float, float]], columns: str = "frA") -> dict[str, Any]:
    """Least squares through the median of equal steps. `columns`: of f(ixed), r(ows), A(udio)."""
    equal: dict[tuple[float, float], list[float]] = defaultdict(list)
    for rows, audio_s, seconds in steps:
        equal[rows, round(audio_s, 1)].append(seconds)
    keys = sorted(key for key, times in equal.items() if len(times) >= 2)
    measured = np.array([np.median(equal[key]) for key in keys])
    table = {"f": [1.0 for _ in keys], "r": [key[0] for key in keys], "A": [key[1] for key in keys]}
    names = {"f": "fixed_s", "r": "row_s", "A": "audio_factor"}
    chosen = list(columns)
    while True:  # a negative part is left out, the most negative first
        matrix = np.array([table[each] for each in chosen]).T / measured[:, None]
        found, *_ = np.linalg.lstsq(matrix, np.ones(len(measured)), rcond=None)
        if found.min() >= 0 or len(chosen) == 1:
            break
        del chosen[int(found.argmin())]
    residual = float(np.sqrt(np.mean((matrix @ found - 1) ** 2)))
    costs = {names[each]: float(f"{max(0.0, value):.4g}") for each, value in zip(chosen, found, strict=True)}
    return {**costs, "residual": round(residual, 3), "samples": len(keys)}


def recorder(loaded: Any) -> Steps:
    """Records every step of an engine from now on."""
    loop = loaded.client.backend.loop
    steps: Steps = defaultdict(list)
    audio = {"encode": 0.0}
    record, executor = loop.stats.record_step, loop.executor

    last_s = [0.0]

    def recorded(stage: str, seconds: float, rows: int, fill: float) -> None:
        now_s = time.thread_time()  # of the engine's thread
        spent_s, last_s[0] = now_s - last_s[0], now_s
        if spent_s < 10 * seconds + 0.1:  # not the first, which has all that came before
            steps[stage].append((rows, audio.get(stage, 0.0), spent_s))
        record(stage, seconds, rows, fill)

    loop.stats.record_step = recorded
    if not loaded.card.streaming:
        encode = executor.encode_runner.encode

        def encoded(batch: Any, *rest: Any) -> Any:
            audio["encode"] = sum(map(len, batch)) / RATE_HZ
            return encode(batch, *rest)

        executor.encode_runner.encode = encoded
    else:
        runner = executor.model_runner
        step = runner.step

        def stepped(sessions: Any, now_ms: float) -> Any:
            size = min(runner._step_frames(session, now_ms) for session in sessions)
            audio["chunk"] = len(sessions) * size * runner.model.frame_samples / RATE_HZ
            return step(sessions, now_ms)

        runner.step = stepped
    return steps


def executor_of(client: Any) -> Any:
    """Returns the executor of an EngineClient whose engine is on a thread of this process."""
    return client.backend.loop.executor


def utterance_times(name: str, speech: Sequence[Audio], rounds: int) -> dict[str, Any]:
    import asr_serve
    from asr_serve.config import EngineConfig

    with asr_serve.load(name, engine=EngineConfig(prefix_bytes=0)) as loaded:
        client, executor = loaded.client, executor_of(loaded.client)
        cuts = {length_s: clips.cut(speech, length_s) for length_s in LENGTHS_S}
        for length_s in LENGTHS_S:  # warm
            client.submit(cuts[length_s][0]).future.result()
        steps = recorder(loaded)
        tokens: list[tuple[float, int]] = []
        at = 0
        for _ in range(rounds):
            for length_s in LENGTHS_S:
                for burst in BURSTS:
                    if burst * length_s > 80:
                        continue
                    chosen = [cuts[length_s][(at + i) % len(cuts[length_s])] for i in range(burst)]
                    at += burst
                    tickets = [client.submit(pcm, priority="bulk") for pcm in chosen]
                    tokens += [(length_s, len(ticket.future.result().tokens)) for ticket in tickets]
        drafted, accepted = executor.loop.stats.draft_tokens, executor.loop.stats.accepted_tokens
        listen(loaded, [clip for clip in speech if 3.0 < len(clip) / RATE_HZ < 9.0][: 2 * rounds])
        drafted = executor.loop.stats.draft_tokens - drafted
        accepted = executor.loop.stats.accepted_tokens - accepted
        lengths, counts = (np.array(column, float) for column in zip(*tokens, strict=True))
        slope, fixed = np.polyfit(lengths, counts, 1)
        frames_per_s = executor.encode_runner.encode([cuts[9.0][0]])[0].frames / 9.0
        return {
            "kind": "utterance",
            "encode": fit(steps["encode"]),
            "verify": fit(steps["verify"], "fr"),
            "decode": fit(steps["decode"], "fr"),
            "tokens_per_s": round(float(slope), 2),
            "tokens_fixed": round(max(0.0, float(fixed)), 2),
            "accepted": round(accepted / max(1, drafted), 3),
            "max_rows": executor.decode_runner.max_rows,
            "encode_audio_s": round(executor.scheduler.encode_frames / frames_per_s, 1),
            "packed": executor.device.packs_clips,
        }


def listen(loaded: Any, speech: Sequence[Audio]) -> None:
    """Sends clips as a live caller does, in real time: hypotheses of growing segments, with the last one as a draft."""
    from asr_serve.pipelines.live.live_session import LiveSession
    from asr_serve.pipelines.options import ListenOptions

    pause = np.zeros(RATE_HZ, np.float32)
    sound = np.concatenate([part for clip in speech for part in (clip, pause)])
    session = LiveSession(loaded.client, loaded.tokenizer, ListenOptions(), lambda: None)
    begun_s = time.monotonic()
    for first, end in live_speech.packets(len(sound)):
        while (left_s := begun_s + end / RATE_HZ - time.monotonic()) > 0:
            time.sleep(min(0.01, left_s))
            session.advance()
        session.append_audio(sound[first:end])
        session.advance()
    session.close()


def streaming_times(name: str, speech: Sequence[Audio], rounds: int) -> dict[str, Any]:
    import asr_serve
    from asr_serve.config import EngineConfig

    config = EngineConfig(prefix_bytes=0, use_chunked_inference=True)
    with asr_serve.load(name, engine=config) as loaded:
        client, runner = loaded.client, executor_of(loaded.client).model_runner
        card, frame_s = client.card, runner.model.frame_samples / RATE_HZ
        short, bulk = runner.sizes
        chunk = short * runner.model.frame_samples
        cuts = clips.cut(speech, 6.0)

        def together(count: int, chunks: int) -> None:
            streams = [client.open_stream(live=True) for _ in range(count)]
            for number in range(chunks):
                futures = [
                    stream.submit_audio(cuts[i % len(cuts)][number * chunk : (number + 1) * chunk])
                    for i, stream in enumerate(streams)
                ]
                for future in futures:
                    future.result()
            for stream in streams:
                stream.close()

        for count in STREAMS:
            together(count, 4)
        steps = recorder(loaded)
        for _ in range(rounds):
            for count in STREAMS:
                together(count, 24)
        live_steps = [step for step in steps["chunk"] if step[0] in STREAMS]
        time.sleep(5.2)  # no caller counts as live any more: files take long steps
        del steps["chunk"][:]
        for count in (1, 2, 4) * rounds:
            streams = [client.open_stream(live=False) for _ in range(count)]
            for future in [s.submit_audio(cuts[i], last=True) for i, s in enumerate(streams)]:
                future.result()
        bulk_steps = [step for step in steps["chunk"] if step[1] >= 0.9 * step[0] * bulk * frame_s]
        return {
            "kind": "streaming",
            "chunk": fit(live_steps + bulk_steps),
            "chunk_s": round(short * frame_s, 4),
            "lag_s": round(card.lag_samples(short) / RATE_HZ - short * frame_s, 4),
            "wait_s": round(runner.wait_ms / 1_000, 4),
            "max_rows": runner.max_rows,
            "bulk_s": round(bulk * frame_s, 4),
        }


def speech_times(name: str, rounds: int) -> dict[str, Any]:
    import asr_serve

    with asr_serve.load(name) as loaded:
        rate_hz, steps = loaded.card.rate_hz, []
        loaded.speak(SENTENCES[1]).read()
        for _ in range(rounds + 1):
            for text in SENTENCES:
                began_s = time.process_time()
                samples = len(loaded.speak(text, seed=7).read())
                steps.append((1.0, samples / rate_hz, time.process_time() - began_s))
        return {"kind": "speech", "speak": fit(steps, "fA")}


def vad_factor(name: str, speech: Sequence[Audio]) -> float:
    """Seconds of voice activity for each second of a file."""
    import asr_serve
    from asr_serve.config import EngineConfig

    with asr_serve.load(name, engine=EngineConfig(prefix_bytes=0)) as loaded:
        steps = recorder(loaded)
        long = np.concatenate(list(speech))[: 60 * RATE_HZ]
        list(loaded.transcribe([long]))
        return sum(seconds for _, _, seconds in steps["vad"]) / (len(long) / RATE_HZ)


@contextmanager
def server(model: str, folder: Path) -> Iterator[tuple[int, int]]:
    """A server on one core: its port and its process."""
    port = free_port()
    command = ["-m", "asr_serve.api.cli", "serve", "--port", str(port), "--model", model, "--voice", "none"]
    command[:2] = ["-c", "from asr_serve.api.cli import main; main()"]
    more = ["--set", "engine.prefix_bytes=0", "--set", "engine.use_chunked_inference=true"]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, *command, *more], stdout=log, stderr=log, start_new_session=True, cwd=folder
    )
    try:
        if trouble := wait_ready(process, port, "/ready", 300):
            raise SystemExit(f"{trouble}: {(folder / 'server.log').read_text()[-2_000:]}")
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def engine_cpu_s(pid: int) -> float:
    """Processor seconds of the engine's process below a server."""
    found = 0.0
    for member in serve_load.tree(pid):
        line = Path(f"/proc/{member}/cmdline").read_bytes()
        if b"engine.process.main" in line:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            found += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def server_times(model: str, speech: Sequence[Audio], vad: float, folder: Path) -> dict[str, Any]:
    """Packets: all that silent callers cost, voice activity included. Files: what the server's process uses."""
    import asyncio

    from websockets.asyncio.client import connect

    packet = bytes(2 * live_speech.PACKET_SAMPLES)

    async def silent(port: int) -> None:
        async with connect(f"ws://{HOST}:{port}/v1/stream", proxy=None, compression=None) as line:
            reading = asyncio.create_task(drain(line))
            begun_s = time.monotonic()
            for number in range(int(LIVE_S * RATE_HZ / live_speech.PACKET_SAMPLES)):
                await asyncio.sleep(begun_s + number * live_speech.PACKET_SAMPLES / RATE_HZ - time.monotonic())
                await line.send(packet)
            reading.cancel()

    async def drain(line: Any) -> None:
        async for _ in line:
            pass

    async def callers(port: int) -> None:
        await asyncio.gather(*(silent(port) for _ in range(LIVE_CALLERS)))

    def post(port: int, body: bytes) -> None:
        with closing(http.client.HTTPConnection(HOST, port, timeout=120)) as line:
            headers = {"Content-Type": f"multipart/form-data; boundary={serve_load.BOUNDARY}"}
            line.request("POST", "/v1/audio/transcriptions", body, headers)
            answer = line.getresponse()
            if (status := answer.status) != 200:
                raise SystemExit(f"{status}: {answer.read()[:300]!r}")
            answer.read()

    with server(model, folder) as (port, pid):
        path_s = asyncio.run(live_path_s(port, speech))
        asyncio.run(callers(port))  # warm
        before_s = serve_load.tree_cpu_s(pid)
        asyncio.run(callers(port))
        packets = LIVE_CALLERS * LIVE_S * RATE_HZ / live_speech.PACKET_SAMPLES
        packet_s = (serve_load.tree_cpu_s(pid) - before_s) / packets
        costs = []
        for length_s in (2.0, 20.0):
            pieces = clips.cut(speech, length_s)
            bodies = []
            for number in range(FILES):
                path = folder / f"{length_s:g}-{number}.wav"
                write_wav(path, pieces[number % len(pieces)])
                bodies.append(serve_load.request(path, HOST, "/", {}).partition(b"\r\n\r\n")[2])
            post(port, bodies[0])
            own_s = serve_load.tree_cpu_s(pid) - engine_cpu_s(pid)
            for body in bodies:
                post(port, body)
            costs.append((serve_load.tree_cpu_s(pid) - engine_cpu_s(pid) - own_s) / FILES)
    factor = max(0.0, costs[1] - costs[0]) / 18.0
    return {
        "live_packet_s": float(f"{packet_s:.3g}"),
        "file_s": float(f"{max(0.0, costs[0] - 2 * factor):.3g}"),
        "file_audio_factor": float(f"{factor + vad:.3g}"),
        "packet_s": live_speech.PACKET_SAMPLES / RATE_HZ,
        "live_path_s": float(f"{path_s:.3g}"),
    }


async def live_path_s(port: int, speech: Sequence[Audio]) -> float:
    """Median time of finals of a caller who is alone."""
    short = [clip for clip in speech if 1.0 < len(clip) / RATE_HZ < 4.0][:PATH_CLIPS]
    pause = np.zeros(round(2.5 * SILENCE_MS / 1_000 * RATE_HZ), np.float32)
    sound = np.concatenate([part for clip in short for part in (clip, pause)])
    pcm = np.clip(np.rint(32_768 * sound), -32_768, 32_767).astype(np.int16)
    finals = await live_finals.speak(HOST, port, pcm, SILENCE_MS)
    return float(np.median([ms for ms, _ in finals[1:]])) / 1_000  # the first is of code that runs the first time


def write_wav(path: Path, pcm: Audio) -> None:
    import wave

    data = np.clip(np.rint(pcm * 32_768), -32_768, 32_767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(data.tobytes())


def measure_model(name: str, data: Path, rounds: int) -> dict[str, Any]:
    """One model's part of the table; runs in a process of its own."""
    from asr_serve.models.registry import TtsCard, engine_card

    found = engine_card(name)
    if isinstance(found, TtsCard):
        return speech_times(name, rounds)
    speech = [clip.audio for clip in clips.load(data, 40)]
    if found.streaming:  # type: ignore[union-attr]
        return streaming_times(name, speech, rounds)
    return utterance_times(name, speech, rounds)


def child(work: str, name: str, args: argparse.Namespace, folder: Path) -> Any:
    """Runs a part of the measurement in a process of its own, on one core."""
    answer = folder / "answer.json"
    command = [sys.executable, __file__, "--data", str(args.data), "--rounds", str(args.rounds), "--child", work, name]
    command += [str(answer)]
    core = sorted(os.sched_getaffinity(0))[-1:]
    env = {**os.environ, "ASR_SERVE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, preexec_fn=lambda: os.sched_setaffinity(0, core))
    return json.loads(answer.read_text())


def run_child(args: argparse.Namespace) -> None:
    work, name, answer = args.child
    if work == "model":
        found: Any = measure_model(name, args.data, args.rounds)
    else:
        speech = [clip.audio for clip in clips.load(args.data, 40)]
        found = server_times(name, speech, vad_factor(name, speech), Path(answer).parent)
    Path(answer).write_text(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        run_child(args)
        return 0
    import tempfile

    with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as name:
        folder = Path(name)
        models = {}
        for model in args.models.split(","):
            models[model] = child("model", model, args, folder)
            print(f"{model}: {json.dumps(models[model])}", file=sys.stderr)
        # A final of a streaming model has a step in it, which is the model's.
        utterance = [model for model, times in models.items() if times["kind"] == "utterance"]
        server_found = child("server", (utterance or list(models))[0], args, folder)
        print(f"server: {json.dumps(server_found)}", file=sys.stderr)
    about = machine.describe(1)
    table = {
        "machine": args.machine,
        "description": args.description or f"{machine.cpu()}, {machine.cores()} cores",
        "cores": machine.cores(),
        "cores_per_replica": 1,
        "gpus": 0,
        "gpus_per_replica": 0,
        "price_per_hour": args.price,
        "price_source": args.price_source,
        "measured": f"{time.strftime('%Y-%m-%d')}, processor time on one core, load average {about['load_1m']}",
        "server": server_found,
        "models": models,
    }
    machine.write(args.output, table)
    rows = [
        {"name": "asr-serve", "model": model, "stage": stage, **cost}
        for model, times in models.items()
        for stage, cost in times.items()
        if isinstance(cost, dict)
    ]
    machine.tell(args.json, {"bench": "service-times", "machine": about, "rows": rows})
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--machine", default="this-machine", metavar="NAME", help="name of the machine kind")
    add("--description", default="", metavar="TEXT", help="the machine, in words")
    add("--models", default="vosk-small-en,moonshine-tiny-en,whisper-tiny-en,fastpitch-en", metavar="A,B")
    add("--price", type=float, default=0.0, metavar="X", help="price of this machine for an hour")
    add("--price-source", default="", metavar="TEXT", help="where the price is from")
    add("--rounds", type=int, default=3, metavar="N", help="rounds (3)")
    add("--output", type=Path, metavar="FILE", help="table to write")
    add("--json", type=Path, metavar="FILE", help="where the report goes")
    add("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
