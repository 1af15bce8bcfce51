"""The bench of voice activity: what it counts, and the noise and telephone that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from bench_modules import bench_modules

S = 16_000

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("segmentation", "int8") as modules:
        yield modules


def tone(hz: float) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(S) / S).astype(np.float32)


def test_errors_of_two_texts_of_each_clip_are_compared_by_clip(bench: SimpleNamespace) -> None:
    references = ["red green", "blue grey", "white black", ""]
    whole = ["red green", "blue", "white black", "pink"]
    segmented = ["red", "blue grey", "white", "pink"]
    row = bench.segmentation.compare(references, whole, segmented)
    assert (row["clips"], row["words"], row["errors_whole"], row["errors_segmented"]) == (3, 6, 1, 2)
    assert (row["words_changed"], row["more_errors"]) == (3 + 0, 1)
    assert row["more_errors_sd"] == 1.6  # of +1, -1, +1 about their mean of 1/3: the root of 8/3
    assert row["wer_whole"] == pytest.approx(100 / 6, abs=0.01)


def test_the_total_of_several_rows(bench: SimpleNamespace) -> None:
    names = ("words", "errors_whole", "errors_segmented", "words_changed", "more_errors", "more_errors_sd")
    values = ((100, 10, 13, 5, 3, 3.0), (300, 30, 26, 9, -4, 4.0))
    rows = [dict(zip(names, each, strict=True)) for each in values]
    found = bench.segmentation.total(rows)
    assert (found["wer_whole"], found["wer_segmented"], found["words_changed"]) == (10.0, 9.75, 14)
    assert (found["more_errors"], found["more_errors_sd"]) == (-1, 5.0)


def test_a_telephone_passes_its_band_alone(bench: SimpleNamespace) -> None:
    low, middle, high = (
        np.abs(np.fft.rfft(bench.segmentation.telephone(tone(hz) + tone(1_000)))) for hz in (100, 500, 5_000)
    )
    assert middle[500] > 0.9 * middle[1_000]
    assert low[100] < 0.01 * low[1_000]
    assert high[5_000] < 0.01 * high[1_000]


def test_noise_has_the_level_it_should_and_is_the_same_again(bench: SimpleNamespace) -> None:
    audio = tone(440)
    made = bench.segmentation.noisy(audio)
    assert 20 * np.log10(audio.std() / (made - audio).std()) == pytest.approx(8, abs=0.1)
    assert (made == bench.segmentation.noisy(audio)).all()
    assert made.dtype == np.float32


def test_faint_speech_is_a_tenth_of_a_telephone_s_in_noise(bench: SimpleNamespace) -> None:
    audio = tone(440)
    noise = bench.segmentation.faint(audio) - 0.1 * bench.segmentation.telephone(audio)
    assert noise.std() == pytest.approx(0.002, rel=0.05)


def test_words_of_8_bits_beyond_those_of_16_over_all_speech(bench: SimpleNamespace) -> None:
    def row(mode: str, data: str, unlike: int) -> dict[str, object]:
        counts = {"minutes": 10.0, "texts": 5, "texts_as_fp32": 4, "words_of_fp32": 200, "words_unlike_fp32": unlike}
        return {"model": "m", "way": "greedy", "mode": mode, "data": data, **counts}

    rows = [{"model": "m", "way": "greedy", "mode": "fp32", "data": "a", "minutes": 10.0}]
    rows += [row("bf16", "a", 1), row("auto", "a", 5), row("bf16", "b", 3), row("auto", "b", 3), row("auto", "c", 99)]
    found = {each["mode"]: each for each in bench.int8.speech_totals(rows, ["a", "b"])}
    assert set(found) == {"bf16", "auto"}
    assert (found["bf16"]["minutes"], found["bf16"]["words_unlike_fp32_percent"]) == (20.0, 1.0)
    assert (found["auto"]["words_unlike_fp32_percent"], found["auto"]["beyond_bf16_percent"]) == (2.0, 1.0)
