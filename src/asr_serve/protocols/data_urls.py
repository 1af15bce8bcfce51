"""Data URLs: audio inside a field of text."""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

from asr_serve.errors import OptionError
from asr_serve.protocols.form_fields import quote_for_message


def decode_data_url(url: str, field: str) -> bytes:
    """Bytes in `data:audio/wav;base64,...`; the media type is ignored, for the format is detected from the bytes.
    `field`: its name. Raises OptionError.

    >>> decode_data_url("data:audio/wav;base64,UklGRg==", "file"), decode_data_url("data:,RIFF", "file")
    (b'RIFF', b'RIFF')
    """
    head, comma, body = url.partition(",")
    if not comma and head.casefold().startswith("data:"):
        raise OptionError(
            f"{field}={quote_for_message(url)} ends before its audio",
            "all of a data URL, like data:audio/wav;base64,UklGR...",
            "curl cuts it at the ; unless it is sent with --form-string instead of -F",
            param=field,
        )
    if not comma or not head.casefold().startswith("data:"):
        raise OptionError(
            f"{field}={quote_for_message(url)}",
            "a data URL, like data:audio/wav;base64,UklGR...: nothing is fetched from addresses",
            param=field,
        )
    if not head.casefold().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return binascii.a2b_base64("".join(body.split()), strict_mode=True)
    except (binascii.Error, ValueError):
        raise OptionError(
            f"{field}={quote_for_message(url)}", "after the comma, base64 with its padding", param=field
        ) from None
