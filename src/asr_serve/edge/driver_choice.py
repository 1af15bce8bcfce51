"""Choice of the packet driver by the settings, and by what this host allows."""

from __future__ import annotations

import logging

from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.packet_driver import PacketDriver, RecvmmsgDriver
from asr_serve.edge.xdp.xdp_driver import DriverUnavailable, XdpDriver

log = logging.getLogger(__name__)


def open_driver(config: EdgeConfig) -> PacketDriver:
    """Opens the driver of the settings. Raises OptionError for a port that cannot be listened on, DriverUnavailable
    where AF_XDP was asked for by name and cannot be had."""
    if config.interface is not None and config.driver != "recvmmsg":
        try:
            return XdpDriver(
                config.host, config.port, config.interface, gather_ms=config.gather_ms, busy_poll_us=config.busy_poll_us
            )
        except DriverUnavailable as error:
            if config.driver == "af_xdp":
                raise
            log.warning("packets come by recvmmsg, as AF_XDP cannot be had: %s", error)
    return RecvmmsgDriver(config.host, config.port, gather_ms=config.gather_ms)
