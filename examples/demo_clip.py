"""Print the path of real speech that is here already: a clip inside the package moonshine-voice."""

import importlib.util
from pathlib import Path


def demo_clip() -> Path:
    """44 s of `A Tale of Two Cities`. Found without importing the package, which wants a sound card."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo clip is in a package that is missing: pip install moonshine-voice==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "assets" / "two_cities.wav"


if __name__ == "__main__":
    print(demo_clip())
