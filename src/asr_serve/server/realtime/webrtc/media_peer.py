"""Media of one call: DTLS, SRTP, RTCP reports and the data channel. aiortc, which does all of these, is loaded by this
file alone.

RTCPeerConnection is not used: its ICE agent wants a socket for each call, and its receiver has a jitter buffer that
neither conceals nor tells what is lost. The parts of aiortc below it take other ones: RTCDtlsTransport any transport
with `_recv` and `_send`, and any receiver of its protocol RtpReceiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import fractions
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import av
from aiortc import (
    RTCCertificate,
    RTCDataChannel,
    RTCDtlsTransport,
    RTCIceTransport,
    RTCRtpSender,
    RTCSctpCapabilities,
    RTCSctpTransport,
)
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtcdtlstransport import RTCDtlsFingerprint, RTCDtlsParameters
from aiortc.rtcrtpparameters import RTCRtpCodecParameters, RTCRtpReceiveParameters, RTCRtpSendParameters
from aiortc.rtcrtpreceiver import StreamStatistics
from aiortc.rtp import AnyRtcpPacket, RtcpByePacket, RtcpReceiverInfo, RtcpRrPacket, RtcpSrPacket
from aiortc.rtp import RtpPacket as AiortcRtpPacket

from asr_serve.edge.rtp import RtpPacket
from asr_serve.errors import ClientGone
from asr_serve.server.realtime.webrtc.offer_answer import Fingerprint, Offer

if TYPE_CHECKING:
    from asr_serve.server.realtime.webrtc.ice_lite import IceLiteTransport

SPEECH_LABEL = "speech"
"""Label of the data channel over which a client has texts spoken."""
SPEECH_HZ = 24_000
SPEECH_FRAME_SAMPLES = SPEECH_HZ // 50
SPEECH_AHEAD_BYTES = 2 * SPEECH_HZ // 2
"""Sound that waits to be sent at most: half a second."""
CHANNEL_BUFFER_BYTES = 64 << 10
"""Bytes that wait in a data channel, from which on no more is sent."""
REPORT_S = 1.0
"""Interval of receiver reports, from which the other side learns its loss and round-trip time."""
MAX_SOURCES = 4
"""SSRCs of one call that are reported on."""


class AudioReceiver:
    """Receiver of a call's audio, in place of aiortc's RTCRtpReceiver: packets go out as they arrive, in any order;
    receiver reports go back."""

    def __init__(self, clock_hz: int, on_packet: Callable[[RtpPacket], None]) -> None:
        self._clock_hz, self._on_packet = clock_hz, on_packet
        self._ssrc = secrets.randbits(32)
        self._sources: dict[int, StreamStatistics] = {}
        self._sender_reports: dict[int, tuple[int, float]] = {}
        """Middle of the NTP time of each source's last sender report, and when that arrived."""

    def _handle_disconnect(self) -> None:
        """Called by the transport, whose change of state tells the same."""

    async def _handle_rtcp_packet(self, packet: AnyRtcpPacket) -> None:
        match packet:
            case RtcpSrPacket() if packet.ssrc in self._sources:
                middle = packet.sender_info.ntp_timestamp >> 16 & 0xFFFFFFFF
                self._sender_reports[packet.ssrc] = middle, time.monotonic()
            case RtcpByePacket():
                for source in packet.sources:
                    self._sources.pop(source, None)
                    self._sender_reports.pop(source, None)

    async def _handle_rtp_packet(self, packet: AiortcRtpPacket, arrival_time_ms: int) -> None:
        source = self._sources.get(packet.ssrc)
        if source is None:
            while len(self._sources) >= MAX_SOURCES:
                oldest = next(iter(self._sources))
                del self._sources[oldest]
                self._sender_reports.pop(oldest, None)
            source = self._sources[packet.ssrc] = StreamStatistics(self._clock_hz)
        source.add(packet)
        self._on_packet(
            RtpPacket(
                packet.payload_type,
                bool(packet.marker),
                packet.sequence_number,
                packet.timestamp,
                packet.ssrc,
                packet.payload,
            )
        )

    def report(self) -> bytes | None:
        """Receiver report on all sources; None while there is none."""
        reports = []
        for ssrc, source in self._sources.items():
            middle, arrived_s = self._sender_reports.get(ssrc, (0, 0.0))
            delay = min(int((time.monotonic() - arrived_s) * 65_536), 0xFFFFFFFF) if middle else 0
            reports.append(
                RtcpReceiverInfo(
                    ssrc=ssrc,
                    fraction_lost=source.fraction_lost,
                    packets_lost=source.packets_lost,
                    highest_sequence=source.cycles + (source.max_seq or 0) & 0xFFFFFFFF,
                    jitter=source.jitter,
                    lsr=middle,
                    dlsr=delay,
                )
            )
        return bytes(RtcpRrPacket(ssrc=self._ssrc, reports=reports)) if reports else None


class SpeechTrack(MediaStreamTrack):
    """Track of synthesized speech, s16le at SPEECH_HZ. From the first sound on it never pauses: silence is sent where
    nothing is said, so that the other side's clock goes on."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._pcm = bytearray()
        self._room, self._begun = asyncio.Event(), asyncio.Event()
        self._clock = asyncio.get_running_loop().time  # `_loop` is the base class's
        self._first_s, self._sent_samples = 0.0, 0
        self._discards = False

    async def write(self, pcm: bytes) -> None:
        """Appends sound, as there is room."""
        self._begun.set()
        at = 0
        while at < len(pcm) and not self._discards and self.readyState == "live":
            if len(self._pcm) >= SPEECH_AHEAD_BYTES:
                self._room.clear()
                await self._room.wait()
                continue
            step = SPEECH_AHEAD_BYTES - len(self._pcm)
            self._pcm += pcm[at : at + step]
            at += step

    def discard(self) -> None:
        """Drops what has not been sent, and all that is written until `resume`: the speech was interrupted."""
        self._discards = True
        self._pcm.clear()
        self._room.set()

    def resume(self) -> None:
        self._discards = False

    def stop(self) -> None:
        super().stop()
        self._room.set()
        self._begun.set()

    async def recv(self) -> av.AudioFrame:
        """Returns the next 20 ms when they are due."""
        await self._begun.wait()
        if self.readyState != "live":
            raise MediaStreamError
        now_s = self._clock()
        if not self._sent_samples:
            self._first_s = now_s
        await asyncio.sleep(self._first_s + self._sent_samples / SPEECH_HZ - now_s)
        frame = av.AudioFrame(format="s16", layout="mono", samples=SPEECH_FRAME_SAMPLES)
        size = 2 * SPEECH_FRAME_SAMPLES
        frame.planes[0].update(bytes(self._pcm[:size]).ljust(size, b"\0"))
        del self._pcm[:size]
        self._room.set()
        frame.sample_rate, frame.pts = SPEECH_HZ, self._sent_samples
        frame.time_base = fractions.Fraction(1, SPEECH_HZ)
        self._sent_samples += SPEECH_FRAME_SAMPLES
        return frame


class MediaPeer:
    """Peer of one call, over a transport of its own. Belongs to the event loop's thread."""

    def __init__(
        self,
        transport: IceLiteTransport,
        offer: Offer,
        channel_label: str | None,
        on_packet: Callable[[RtpPacket], None],
        on_message: Callable[[str | bytes], None],
        on_speech_message: Callable[[str | bytes], None] | None,
        on_closed: Callable[[], None],
    ) -> None:
        """`channel_label`: label of the data channel of events, others being closed; None: the first one.
        `on_speech_message`: None: nothing is spoken here. `on_closed`: called once, when the other side has ended or
        lost the call."""
        self._on_speech_message = on_speech_message
        self._transport, self._offer, self._label = transport, offer, channel_label
        self._on_message, self._on_closed = on_message, on_closed
        self._dtls = RTCDtlsTransport(cast(RTCIceTransport, transport), [RTCCertificate.generateCertificate()])
        self._dtls._set_role("client" if offer.setup == "passive" else "server")
        self._dtls.on("statechange", self._on_dtls_state)
        self._receiver = AudioReceiver(offer.format.clock_hz, on_packet)
        self._dtls._register_rtp_receiver(
            self._receiver,
            RTCRtpReceiveParameters(
                codecs=[
                    RTCRtpCodecParameters(
                        mimeType=f"audio/{offer.format.encoding}",
                        clockRate=offer.format.clock_hz,
                        payloadType=offer.payload_type,
                    )
                ],
                muxId=offer.sections[offer.audio].mid,
            ),
        )
        self._sctp = RTCSctpTransport(self._dtls) if offer.channel is not None else None
        self._channel: RTCDataChannel | None = None
        self._speech_channel: RTCDataChannel | None = None
        self.speech_track: SpeechTrack | None = None
        """Track of what is spoken; None: the offer takes no sound, or nothing is spoken here."""
        self._sender: RTCRtpSender | None = None
        if on_speech_message is not None and offer.receives_audio and offer.channel is not None:
            self.speech_track = SpeechTrack()
            self._sender = RTCRtpSender(self.speech_track, self._dtls)
        self._channel_changed = asyncio.Event()
        self._reports: asyncio.Task[None] | None = None
        self._closed = False
        if self._sctp is not None:
            self._sctp.on("datachannel", self._on_channel)

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        made = self._dtls.getLocalParameters().fingerprints
        return tuple(Fingerprint(each.algorithm, each.value) for each in made if each.algorithm == "sha-256")

    @property
    def ssrc(self) -> int | None:
        """SSRC of the sound that is sent; None: none is."""
        return None if self._sender is None else self._sender._ssrc

    @property
    def connected(self) -> bool:
        return self._dtls.state == "connected"

    async def connect(self) -> None:
        """Waits for the handshake, and for the data channel where one was offered. Raises ClientGone."""
        try:
            await self._transport.wait_reachable()
        except ConnectionError:
            raise ClientGone("the call ended before it was connected") from None
        theirs = [RTCDtlsFingerprint(each.algorithm, each.value) for each in self._offer.fingerprints]
        await self._dtls.start(RTCDtlsParameters(fingerprints=theirs))
        if not self.connected:
            raise ClientGone("the handshake of DTLS failed: it was broken off, or the certificate is another")
        self._reports = asyncio.create_task(self._report())
        if self._sender is not None:
            await self._sender.send(self._send_parameters())
        if self._sctp is not None:
            capabilities = RTCSctpCapabilities(maxMessageSize=self._offer.max_message_bytes)
            await self._sctp.start(capabilities, self._offer.sctp_port)
            while self._channel is None:
                if not self.connected:
                    raise ClientGone("the call ended before its data channel was open")
                await self._wait_channel_change()

    async def send(self, event: str) -> None:
        """Sends an event when the channel has room. Raises ClientGone."""
        await self._send_to(self._channel, event)

    async def send_speech_event(self, event: str) -> None:
        """Sends an event of the speech that is spoken. Raises ClientGone."""
        await self._send_to(self._speech_channel, event)

    async def _send_to(self, channel: RTCDataChannel | None, event: str) -> None:
        while channel is not None and channel.readyState == "open" and channel.bufferedAmount > CHANNEL_BUFFER_BYTES:
            await self._wait_channel_change()
        if channel is None or channel.readyState != "open" or not self.connected:
            raise ClientGone("the data channel is closed")
        try:
            channel.send(event)
        except ValueError as error:
            raise ClientGone(f"an event is longer than the client takes: {error}") from None

    async def close_channel(self) -> None:
        """Closes the channel, once the other side has all events; returns when it is closed."""
        channel = self._channel
        if channel is None or not self.connected:
            return
        channel.close()
        while channel.readyState != "closed" and self.connected:
            await self._wait_channel_change()

    async def close(self) -> None:
        """Ends the call and releases everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._reports is not None:
            self._reports.cancel()
            await asyncio.wait({self._reports})
        for channel in (self._channel, self._speech_channel):
            if channel is not None:
                channel.remove_all_listeners()
        if self._sender is not None:
            await self._sender.stop()
        if self._sctp is not None:
            await self._sctp.stop()
            self._sctp.remove_all_listeners()
        self._dtls._unregister_rtp_receiver(self._receiver)
        self._dtls.remove_all_listeners()
        await self._dtls.stop()
        self._transport.close()
        self._channel_changed.set()

    # --- the parts' events -----------------------------------------------------------------------------

    def _on_dtls_state(self) -> None:
        self._channel_changed.set()
        if self._dtls.state in ("closed", "failed") and not self._closed:
            self._on_closed()

    def _on_channel(self, channel: RTCDataChannel) -> None:
        if channel.label == SPEECH_LABEL and self._speech_channel is None and self.speech_track is not None:
            assert self._on_speech_message is not None
            self._speech_channel = channel
            self._use(channel, self._on_speech_message)
        elif channel.label == SPEECH_LABEL or self._channel is not None or self._label not in (None, channel.label):
            channel.close()
        else:
            self._channel = channel
            self._use(channel, self._on_message)

    def _use(self, channel: RTCDataChannel, on_message: Callable[[str | bytes], None]) -> None:
        channel.bufferedAmountLowThreshold = CHANNEL_BUFFER_BYTES // 2
        for event in ("bufferedamountlow", "close"):
            channel.on(event, self._channel_changed.set)
        channel.on("message", on_message)
        self._channel_changed.set()

    async def _wait_channel_change(self) -> None:
        self._channel_changed.clear()
        await self._channel_changed.wait()
        if self._closed:
            raise ClientGone("the call has ended")

    def _send_parameters(self) -> RTCRtpSendParameters:
        form = self._offer.format
        codec = RTCRtpCodecParameters(
            mimeType=f"audio/{form.encoding}",
            clockRate=form.clock_hz,
            channels=2 if form.encoding == "opus" else 1,
            payloadType=self._offer.payload_type,
        )
        return RTCRtpSendParameters(codecs=[codec], muxId=self._offer.sections[self._offer.audio].mid)

    async def _report(self) -> None:
        while self.connected:
            await asyncio.sleep(REPORT_S)
            if (report := self._receiver.report()) is not None and self.connected:
                with contextlib.suppress(ConnectionError):
                    await self._dtls._send_rtp(report)
