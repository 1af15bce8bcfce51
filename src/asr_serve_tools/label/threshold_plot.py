"""SVG plot of the hours kept by threshold."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 48, 56
MOST_RATE = 0.5
"""Highest error rate on the axis; above it labels are useless."""
NICE = (1, 2, 2.5, 5, 10)
"""Steps of an axis, times a power of ten."""


def threshold_svg(curve: Sequence[tuple[float, float]], threshold: float, kept_hours: float, total: float) -> str:
    """SVG text of the plot. `curve`: (error rate, hours under it), both ascending. `kept_hours`: hours under the
    threshold, of `total`."""
    most = max(MOST_RATE, threshold)
    unit, scale = ("h", 1.0) if total >= 1 else ("min", 60.0)
    step = _step(total * scale)
    top = max(step, -(-total * scale // step) * step)

    def x(rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * rate / most

    def y(hours: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * hours * scale / top

    points = [(rate, hours) for rate, hours in curve if rate <= most + 1e-9]
    line = " ".join(f"{x(rate):.1f},{y(hours):.1f}" for rate, hours in points)
    share = f"{100 * kept_hours / total:.0f} %" if total else "none"
    title = f"{kept_hours * scale:.2f} of {total * scale:.2f} {unit} kept ({share}) at a threshold of {threshold:g}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="13" fill="#333">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="28" font-size="15">{title}</text>',
    ]
    for number in range(round(top / step) + 1):
        at = y(number * step / scale)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number * step:g}</text>',
        ]
    for number in range(6):
        rate = most * number / 5
        parts.append(f'<text x="{x(rate):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{rate:g}</text>')
    parts += [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">'
        "character error rate between the two models</text>",
        f'<text x="18" y="{(TOP + HEIGHT - BOTTOM) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 18 {(TOP + HEIGHT - BOTTOM) / 2:.0f})">speech kept ({unit})</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
        f'<line x1="{x(threshold):.1f}" x2="{x(threshold):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        'stroke="#d1242f" stroke-dasharray="4 3"/>',
        f'<circle cx="{x(threshold):.1f}" cy="{y(kept_hours):.1f}" r="4" fill="#d1242f"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _step(most: float) -> float:
    """Step of an axis with about five ticks."""
    raw = max(most, 1e-6) / 5
    power = 1.0
    while power * 10 <= raw:
        power *= 10
    while power > raw:
        power /= 10
    return next(power * nice for nice in NICE if power * nice >= raw)
