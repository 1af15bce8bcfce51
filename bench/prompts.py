"""Telephone prompts with their texts, a second set of clips for offline.py, int8.py and others: writes transcripts.tsv.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-wav
    for package in asterisk-*.deb; do dpkg -x $package asterisk; done
    python bench/prompts.py asterisk
    python bench/offline.py --data asterisk --peers onnx

The prompts are of 8 kHz, read by one speaker. Those of a few words are left out, and of the others every one in so many
is taken. Those that were not taken, and shorter ones, go to others/transcripts.tsv, for choices that must not be made
on the clips that they are judged by.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

LISTED = Path("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
SOUNDS = Path("usr/share/asterisk/sounds/en_US_f_Allison")
FEWEST_WORDS, FEWEST_WORDS_OF_OTHERS = 8, 3


def prompts(folder: Path, fewest_words: int = FEWEST_WORDS) -> list[tuple[Path, str]]:
    """Returns path below `folder` and text of each prompt that is long enough, each text once."""
    found: dict[str, Path] = {}
    with gzip.open(folder / LISTED, "rt", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, colon, text = line.strip().partition(": ")
            path = SOUNDS / f"{name}.wav"
            if colon and "[" not in text and len(text.split()) >= fewest_words and (folder / path).is_file():
                found.setdefault(" ".join(text.split()), path)
    return [(path, text) for text, path in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the packages were unpacked")
    parser.add_argument("--clips", type=int, default=50, metavar="N", help="how many (50)")
    args = parser.parse_args()
    found = prompts(args.folder)
    chosen = [found[index * len(found) // args.clips] for index in range(min(args.clips, len(found)))]
    (args.folder / "transcripts.tsv").write_text("".join(f"{path}\t{text}\n" for path, text in chosen), "utf-8")
    taken = {text for _, text in chosen}
    others = [(path, text) for path, text in prompts(args.folder, FEWEST_WORDS_OF_OTHERS) if text not in taken]
    (args.folder / "others").mkdir(exist_ok=True)
    table = "".join(f"../{path}\t{text}\n" for path, text in others)
    (args.folder / "others" / "transcripts.tsv").write_text(table, "utf-8")
    print(f"{len(others)} others, and {len(chosen)} of {len(found)} prompts in {args.folder / 'transcripts.tsv'}")


if __name__ == "__main__":
    main()
