"""Two user agents, or one and a registrar, over a network that loses messages, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from asr_serve.edge.sip.digest import DigestVerifier
from asr_serve.edge.sip.message import SipRequest, SipResponse, SipUri, parse_sip, respond_to
from asr_serve.edge.sip.registration import SipAccount
from asr_serve.edge.sip.session_description import build_answer, build_offer, choose_format
from asr_serve.edge.sip.transactions import (
    MAX_TRANSACTIONS,
    MAX_TRANSACTIONS_PER_SOURCE,
    RESERVED_TRANSACTIONS,
    SipPeer,
    TransactionLayer,
    new_branch,
)
from asr_serve.edge.sip.user_agent import (
    AgentEvent,
    CallChanged,
    CallConfirmed,
    CallEnded,
    CallOffered,
    CallRinging,
    CallState,
    RegistrationChanged,
    SipCall,
    UserAgent,
)
from asr_serve.errors import AtCapacity

OFFER = build_offer("10.0.0.1", 4_000, session=1, version=1)
DELAY_S = 0.01


class Network:
    """Agents by address, and what is under way between them."""

    def __init__(self, *, transport: str = "udp", drops: Callable[[int, bytes], bool] = lambda number, data: False):
        self.now_s, self._transport, self._drops = 1_000.0, transport, drops
        self.agents: dict[str, UserAgent] = {}
        self.sent: list[tuple[str, str, bytes]] = []
        """From, to, message."""
        self._under_way: list[tuple[float, int, str, str, bytes]] = []

    def add(self, host: str, **settings: object) -> UserAgent:
        defaults = {"user": "u", "is_allowed": lambda _: True, "max_calls": 4}
        fixed = {"port": lambda _: 5_060, "local_host": lambda _: host}
        made = UserAgent(**{**defaults, **fixed, **settings})  # type: ignore[arg-type]
        self.agents[host] = made
        return made

    def flush(self) -> None:
        for host, agent in self.agents.items():
            for peer, data in agent.take_output():
                self.sent.append((host, peer.host, data))
                if not self._drops(len(self.sent) - 1, data):
                    self._under_way.append((self.now_s + DELAY_S, len(self.sent), host, peer.host, data))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while True:
            self.flush()
            times = [when_s for when_s, *_ in self._under_way]
            times += [agent.due_s for agent in self.agents.values() if agent.due_s is not None]
            if not times or min(times) > end_s:
                self.now_s = end_s
                return
            self.now_s = max(self.now_s, min(times))
            due = sorted(each for each in self._under_way if each[0] <= self.now_s)
            self._under_way = [each for each in self._under_way if each[0] > self.now_s]
            for _, _, source, target, data in due:
                if target in self.agents:
                    self.agents[target].receive(data, SipPeer(self._transport, source, 5_060), self.now_s)
            for agent in self.agents.values():
                if agent.due_s is not None and agent.due_s <= self.now_s:
                    agent.advance(self.now_s)

    def lines(self) -> list[str]:
        """First lines of what was sent."""
        return [data.split(b" SIP/2.0\r\n")[0].split(b"\r\n")[0].decode() for _, _, data in self.sent]


def answer_of(call: SipCall) -> str:
    assert call.offer is not None
    return build_answer(call.offer, choose_format(call.offer), "10.0.0.2", 5_004, session=2, version=1)


def offered(agent: UserAgent) -> SipCall:
    (event,) = agent.take_events()
    assert isinstance(event, CallOffered)
    return event.call


def kinds(events: list[AgentEvent]) -> list[type]:
    return [type(event) for event in events]


def connect(network: Network, caller: UserAgent, callee: UserAgent) -> tuple[SipCall, SipCall]:
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(0.1)
    theirs = offered(callee)
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(1)
    assert kinds(caller.take_events()) == kinds(callee.take_events()) == [CallConfirmed]
    return ours, theirs


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def pair(network: Network) -> tuple[UserAgent, UserAgent]:
    return network.add("10.0.0.1"), network.add("10.0.0.2")


@pytest.mark.parametrize("hangs_up", ["caller", "callee"])
def test_a_call_is_answered_and_ended_from_either_side(
    network: Network, pair: tuple[UserAgent, UserAgent], hangs_up: str
) -> None:
    caller, callee = pair
    ours, theirs = connect(network, caller, callee)
    assert (theirs.caller, theirs.called) == ("sip:u@10.0.0.1", "sip:u@10.0.0.2")
    ending, call, other = (caller, ours, callee) if hangs_up == "caller" else (callee, theirs, caller)
    ending.hang_up(call, network.now_s)
    network.run(1)
    (event,) = other.take_events()
    assert isinstance(event, CallEnded)
    assert event.cause == "hangup"
    assert kinds(ending.take_events()) == [CallEnded]
    assert caller.calls == callee.calls == []
    invite, ok, ack, bye, last = network.lines()
    assert (invite.split()[0], ok, ack.split()[0], bye.split()[0], last) == (
        *("INVITE", "SIP/2.0 200 OK", "ACK"),
        *("BYE", "SIP/2.0 200 OK"),
    )
    network.run(100)
    assert len(caller.transactions) == len(callee.transactions) == 0


@pytest.mark.parametrize("lost", range(9))
@pytest.mark.parametrize("rings", [False, True])
def test_any_message_may_be_lost(lost: int, rings: bool) -> None:
    network = Network(drops=lambda number, data: number == lost)
    caller, callee = network.add("10.0.0.1"), network.add("10.0.0.2")
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(2)
    theirs = offered(callee)
    if rings:
        callee.ring(theirs, network.now_s)
        network.run(2)
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(3)
    assert ours.state is theirs.state is CallState.CONFIRMED
    callee.hang_up(theirs, network.now_s)
    network.run(3)
    assert ours.state is theirs.state is CallState.ENDED
    network.run(100)
    assert len(caller.transactions) == len(callee.transactions) == 0
    assert not caller.waits_for_responses
    assert caller._sent == callee._sent == {}


@pytest.mark.parametrize("seed", range(8))
def test_a_quarter_of_all_messages_may_be_lost(seed: int) -> None:
    random_ = random.Random(seed)
    network = Network(drops=lambda number, data: random_.random() < 0.25)
    caller, callee = network.add("10.0.0.1"), network.add("10.0.0.2")
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(31)
    theirs = offered(callee)
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(31)
    assert ours.state is theirs.state is CallState.CONFIRMED
    caller.hang_up(ours, network.now_s)
    network.run(60)
    assert theirs.state is CallState.ENDED
    assert kinds(callee.take_events()) == [CallConfirmed, CallEnded]


def test_retransmissions_come_at_the_times_of_the_standard() -> None:
    network = Network(drops=lambda number, data: True)
    caller = network.add("10.0.0.1")
    call = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    times = []
    for _ in range(3_300):
        before = len(network.sent)
        network.run(0.01)
        times += [round(network.now_s - 1_000, 1)] * (len(network.sent) - before)
    assert times == [0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5]
    (event,) = caller.take_events()
    assert event == CallEnded(call, "failed", 408)
    assert (caller.due_s, len(caller.transactions)) == (None, 0)


def test_nothing_is_sent_again_over_a_connection() -> None:
    network = Network(transport="tcp", drops=lambda number, data: True)
    caller = network.add("10.0.0.1")
    caller.place_call("sip:u@10.0.0.2;transport=tcp", OFFER, network.now_s)
    network.run(40)
    assert len(network.sent) == 1
    assert kinds(caller.take_events()) == [CallEnded]


def test_a_call_whose_ack_never_comes_is_ended(network: Network) -> None:
    network._drops = lambda number, data: data.startswith(b"ACK")
    caller, callee = network.add("10.0.0.1"), network.add("10.0.0.2")
    caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(1)
    theirs = offered(callee)
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(40)
    (event,) = callee.take_events()
    assert event == CallEnded(theirs, "failed", 0)
    assert isinstance(caller.take_events()[-1], CallEnded)  # by our BYE
    assert 10 < sum(line.startswith("SIP/2.0 200") for line in network.lines()) < 16


@pytest.mark.parametrize("by", ["caller", "callee", "early"])
def test_a_call_that_rings_is_given_up(network: Network, pair: tuple[UserAgent, UserAgent], by: str) -> None:
    caller, callee = pair
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    if by == "early":  # before anything has come back: CANCEL waits for it
        caller.hang_up(ours, network.now_s)
    network.run(0.1)
    theirs = offered(callee)
    callee.ring(theirs, network.now_s)
    network.run(0.1)
    if by != "early":
        assert kinds(caller.take_events()) == [CallRinging]
    if by == "caller":
        caller.hang_up(ours, network.now_s)
    elif by == "callee":
        callee.reject(theirs, 486, network.now_s, warning='not "now"', retry_after_s=7)
    network.run(5)
    if by == "callee":
        assert caller.take_events() == [CallEnded(ours, "rejected", 486)]
        (busy,) = (data for *_, data in network.sent if data.startswith(b"SIP/2.0 486"))
        assert b"Retry-After: 7\r\n" in busy
        assert b"Warning: 399 asr-serve \"not 'now'\"\r\n" in busy
    else:
        assert caller.take_events() == [CallEnded(ours, "cancelled", 487)]
        assert callee.take_events() == [CallEnded(theirs, "cancelled", 487)]
    network.run(100)
    assert len(caller.transactions) == len(callee.transactions) == 0


def test_a_call_of_ours_rings_for_a_bounded_time(network: Network, pair: tuple[UserAgent, UserAgent]) -> None:
    caller, callee = pair
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(0.1)
    callee.ring(offered(callee), network.now_s)
    network.run(179)
    assert ours.state is CallState.CALLING
    network.run(3)
    assert ours.state is CallState.ENDED
    assert callee.calls == []


def test_an_answer_that_crosses_a_cancel_is_hung_up(network: Network, pair: tuple[UserAgent, UserAgent]) -> None:
    caller, callee = pair
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(0.1)
    theirs = offered(callee)
    callee.ring(theirs, network.now_s)
    network.run(0.1)
    caller.hang_up(ours, network.now_s)
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(2)
    assert ours.state is theirs.state is CallState.ENDED


def test_a_call_without_an_offer_gets_ours(network: Network, pair: tuple[UserAgent, UserAgent]) -> None:
    caller, callee = pair
    ours = caller.place_call("sip:u@10.0.0.2", "", network.now_s)
    network.flush()
    ((_, _, data),) = network.sent
    assert b"Content-Length: 0\r\n" in data
    invite = parse_sip(data)
    network.run(0.1)
    theirs = offered(callee)
    assert theirs.offer is None
    callee.accept(theirs, OFFER, network.now_s)
    callee_answer = build_offer("10.0.0.1", 4_000, ("PCMA",), session=1, version=1).encode()
    network._under_way.clear()
    network.flush()
    network._under_way.clear()
    ok = parse_sip(network.sent[-1][2])
    ack = SipRequest("ACK", "sip:u@10.0.0.2", [("via", "SIP/2.0/UDP 10.0.0.1;branch=z9hG4bKack")])
    ack.headers += [("from", invite.get("from")), ("to", ok.get("to")), ("call-id", ok.call_id), ("cseq", "1 ACK")]
    ack.body = callee_answer
    callee.receive(ack.encode(), SipPeer("udp", "10.0.0.1", 5_060), network.now_s)
    (event,) = callee.take_events()
    assert isinstance(event, CallConfirmed)
    assert event.answer is not None
    assert [form.encoding for form in event.answer.formats.values()] == ["PCMA", "telephone-event"]
    assert ours.id == theirs.id


def reinvite(network: Network, caller: UserAgent, call: SipCall, sdp: str) -> None:
    """What a telephone sends that holds the call, or goes on elsewhere."""
    assert call.dialog is not None
    request = call.dialog.build_request("INVITE", caller._via(call.peer))
    request.add("contact", "<sip:u@10.0.0.1:5060>").add("content-type", "application/sdp")
    request.body = sdp.encode()
    caller._send(request, call.peer, call, network.now_s)


def test_a_change_is_taken_or_refused_and_the_call_goes_on(network: Network, pair: tuple[UserAgent, UserAgent]) -> None:
    caller, callee = pair
    ours, theirs = connect(network, caller, callee)
    reinvite(network, caller, ours, OFFER.replace("a=sendrecv", "a=sendonly").replace("10.0.0.1", "10.0.0.9"))
    network.run(0.1)
    assert callee.take_events() == [CallChanged(theirs)]
    assert theirs.offer is not None
    assert (theirs.offer.is_held, theirs.offer.host) == (True, "10.0.0.9")
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(0.1)
    assert kinds(callee.take_events()) == [CallConfirmed]
    held = theirs.offer
    reinvite(network, caller, ours, OFFER.replace("audio", "image"))  # what cannot be heard changes nothing
    network.run(0.1)
    assert callee.take_events() == []
    assert theirs.offer is held
    assert "SIP/2.0 488 Not Acceptable Here" in network.lines()
    assert theirs.state is CallState.CONFIRMED
    callee.hang_up(theirs, network.now_s)
    network.run(1)
    assert callee.calls == []


def answers(network: Network, agent: UserAgent, data: bytes) -> list[SipResponse]:
    """Responses of one agent to a datagram from 10.0.0.1."""
    agent.receive(data, SipPeer("udp", "10.0.0.1", 5_060), network.now_s)
    parsed = [parse_sip(sent) for _, sent in agent.take_output()]
    return [response for response in parsed if isinstance(response, SipResponse)]


def message(method: str, *lines: str, to: str = "<sip:u@10.0.0.2>", body: str = "") -> bytes:
    head = [f"{method} sip:u@10.0.0.2 SIP/2.0", f"Via: SIP/2.0/UDP 10.0.0.1;branch={new_branch()}"]
    head += ["From: <sip:a@10.0.0.1>;tag=1", f"To: {to}", f"Call-ID: {new_branch()}", f"CSeq: 1 {method}"]
    return "\r\n".join([*head, *lines, f"Content-Length: {len(body)}", "", body]).encode()


CONTACT, TYPE = "Contact: <sip:a@10.0.0.1>", "Content-Type: application/sdp"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (message("OPTIONS"), 200),
        (message("SUBSCRIBE"), 405),
        (message("COFFEE"), 405),
        (message("BYE", to="<sip:u@10.0.0.2>;tag=9"), 481),
        (message("BYE"), 481),
        (message("CANCEL"), 481),
        (message("INVITE", CONTACT, "Require: 100rel"), 420),
        (message("INVITE", TYPE, body=OFFER), 400),
        (message("INVITE", CONTACT, "Content-Type: text/plain", body="hello"), 415),
        (message("INVITE", CONTACT, TYPE, body="v=0"), 488),
        (message("INVITE", CONTACT, TYPE, body=OFFER).replace(b"INVITE sip:u@10.0.0.2", b"INVITE tel:7001"), 416),
    ],
)
def test_what_cannot_be_done_is_answered_by_its_status(network: Network, data: bytes, status: int) -> None:
    agent = network.add("10.0.0.2")
    (response,) = answers(network, agent, data)
    assert response.status == status
    assert agent.take_events() == []
    assert agent.calls == []
    if status in (200, 405):
        assert "INVITE" in response.get("allow")
    (again,) = answers(network, agent, data)  # the same datagram gets the same response
    assert again.encode() == response.encode()


def test_messages_of_strangers_and_nonsense_get_no_response(network: Network) -> None:
    agent = network.add("10.0.0.2", is_allowed=lambda host: host == "10.0.0.9")
    assert answers(network, agent, message("OPTIONS")) == []
    friendly = network.add("10.0.0.3")
    for nonsense in (b"\r\n\r\n", b"\x00\x01", b"GET / HTTP/1.1\r\n\r\n", message("OPTIONS")[:60], b"ACK"):
        assert answers(network, friendly, nonsense) == []
    assert agent.counts == {"received": 1, "not_allowed": 1}
    assert friendly.counts == {"received": 5, "malformed": 4}


def test_responses_go_to_where_the_request_came_from(network: Network) -> None:
    agent = network.add("10.0.0.2")
    data = message("OPTIONS").replace(b"UDP 10.0.0.1", b"UDP 192.0.2.9:7777")
    agent.receive(data, SipPeer("udp", "10.0.0.1", 40_000), 0.0)
    ((peer, response),) = agent.take_output()
    assert peer == SipPeer("udp", "10.0.0.1", 7_777)
    assert b";received=10.0.0.1" in response
    agent.receive(data.replace(b";branch", b";rport;branch"), SipPeer("udp", "10.0.0.1", 40_000), 0.0)
    agent.receive(message("OPTIONS").replace(b";branch", b";rport;branch"), SipPeer("udp", "10.0.0.1", 40_000), 0.0)
    peer, response = agent.take_output()[-1]
    assert peer.port == 40_000
    assert b";rport=40000;" in response


def test_calls_and_transactions_are_bounded(network: Network) -> None:
    agent = network.add("10.0.0.2", max_calls=2)
    for _ in range(2):
        assert answers(network, agent, message("INVITE", CONTACT, TYPE, body=OFFER)) == []
    (busy,) = answers(network, agent, message("INVITE", CONTACT, TYPE, body=OFFER))
    assert busy.status == 486
    assert agent.counts["busy"] == 1
    with pytest.raises(AtCapacity):
        agent.place_call("sip:u@10.0.0.1", OFFER, network.now_s)


def test_a_source_has_its_share_of_the_transactions_and_dialogs_a_reserve() -> None:
    layer = TransactionLayer()

    def send(host: str, count: int, *, is_trusted: bool = False) -> int:
        requests = [parse_sip(message("OPTIONS")) for _ in range(count)]
        peer = SipPeer("udp", host, 5_060)
        return sum(bool(layer.receive(request, peer, 0.0, is_trusted=is_trusted)) for request in requests)

    assert send("10.0.0.1", MAX_TRANSACTIONS_PER_SOURCE + 5) == MAX_TRANSACTIONS_PER_SOURCE
    others = [send(f"10.0.1.{number}", MAX_TRANSACTIONS_PER_SOURCE) for number in range(3)]
    assert MAX_TRANSACTIONS_PER_SOURCE + sum(others) == MAX_TRANSACTIONS - RESERVED_TRANSACTIONS
    assert send("10.0.0.9", RESERVED_TRANSACTIONS + 5, is_trusted=True) == RESERVED_TRANSACTIONS
    assert len(layer) == MAX_TRANSACTIONS
    output = layer.take_output()
    assert len(output) == layer.refused == 5 + MAX_TRANSACTIONS_PER_SOURCE + 5
    assert all(data.startswith(b"SIP/2.0 503") for _, data in output)


def test_a_request_without_credentials_is_answered_once_and_leaves_nothing(network: Network) -> None:
    agent = network.add("10.0.0.2", verifier=DigestVerifier("desk", {"ann": "secret"}))
    forged = message("INVITE", CONTACT, TYPE, body=OFFER)
    (response,) = answers(network, agent, forged)
    assert response.status == 401
    for data in (message("INVITE", "Require: x"), message("OPTIONS"), message("INVITE", to="<sip:u@10.0.0.2>;tag=9")):
        assert len(answers(network, agent, data)) == 1
    assert len(agent.transactions) == 0
    assert agent.due_s is None
    (again,) = answers(network, agent, forged)
    assert again.recipient.tag == response.recipient.tag
    ack = forged.replace(b"INVITE", b"ACK").replace(b"To: <sip:u@10.0.0.2>", b"To: " + response.get("to").encode())
    assert answers(network, agent, ack) == []


def test_the_same_call_by_two_ways_is_one(network: Network) -> None:
    agent = network.add("10.0.0.2")
    data = message("INVITE", CONTACT, TYPE, body=OFFER)
    assert answers(network, agent, data) == []
    (response,) = answers(network, agent, data.replace(b"branch=z9hG4bK", b"branch=z9hG4bKother"))
    assert response.status == 482
    assert len(agent.calls) == 1


@pytest.mark.parametrize("password", ["secret", "wrong", ""])
def test_callers_show_that_they_know_a_password(network: Network, password: str) -> None:
    domain = SipUri("10.0.0.2")
    account = SipAccount(registrar=domain, address="10.0.0.2", user="ann", auth_user="ann", password=password)
    caller = network.add("10.0.0.1", account=account)
    caller.registration = None  # it calls only
    callee = network.add("10.0.0.2", verifier=DigestVerifier("desk", {"ann": "secret"}))
    ours = caller.place_call("sip:u@10.0.0.2", OFFER, network.now_s)
    network.run(1)
    if password != "secret":
        assert caller.take_events() == [CallEnded(ours, "rejected", 401)]
        assert callee.calls == []
        return
    theirs = offered(callee)
    callee.accept(theirs, answer_of(theirs), network.now_s)
    network.run(1)
    assert kinds(caller.take_events()) == [CallConfirmed]
    caller.hang_up(ours, network.now_s)
    network.run(1)
    assert callee.calls == []
    assert callee.counts["unauthorized"] == 1


class Registrar:
    """Registrar whose answers a test chooses."""

    def __init__(self, network: Network, respond: Callable[[int, SipRequest], SipResponse]) -> None:
        self.requests: list[SipRequest] = []
        self.times: list[float] = []
        network.agents["10.0.0.9"] = self  # type: ignore[assignment]
        self._network, self._respond = network, respond
        self._output: list[tuple[SipPeer, bytes]] = []
        self.due_s: float | None = None

    def receive(self, data: bytes, peer: SipPeer, now_s: float) -> None:
        request = parse_sip(data)
        assert isinstance(request, SipRequest)
        self.requests.append(request)
        self.times.append(now_s - 1_000)
        self._output.append((peer, self._respond(len(self.requests), request).encode()))

    def take_output(self) -> list[tuple[SipPeer, bytes]]:
        output, self._output = self._output, []
        return output


def registering(network: Network, **settings: object) -> UserAgent:
    fields = {"user": "7001", "auth_user": "7001", "password": "secret", **settings}
    account = SipAccount(registrar=SipUri("pbx.example.org"), address="10.0.0.9", **fields)  # type: ignore[arg-type]
    return network.add("10.0.0.1", account=account)


def test_a_registration_is_refreshed_before_it_ends_and_removed_at_the_end(network: Network) -> None:
    verifier = DigestVerifier("pbx", {"7001": "secret"})

    def respond(number: int, request: SipRequest) -> SipResponse:
        user = verifier.verify(request, network.now_s)
        if not isinstance(user, str):
            response = respond_to(request, 401, "r")
            response.headers += [("www-authenticate", value) for value in verifier.challenges(network.now_s)]
            return response
        contact = request.get("contact").replace("expires=300", "expires=60")
        return respond_to(request, 200, "r").add("contact", f"<sip:other@10.0.0.4>;expires=9, {contact}")

    registrar = Registrar(network, respond)
    agent = registering(network)
    network.run(1)
    assert agent.take_events() == [RegistrationChanged(True, "for 60 s")]
    first, second = registrar.requests
    assert first.uri == second.uri == "sip:pbx.example.org"
    assert first.get("from").partition(";")[0] == first.get("to") == "<sip:7001@pbx.example.org>"
    assert (second.cseq[0], second.call_id) == (first.cseq[0] + 1, first.call_id)
    network.run(200)
    assert [round(time_s) for time_s in registrar.times] == [0, 0, *(48,) * 2, *(96,) * 2, *(144,) * 2, *(192,) * 2]
    assert agent.take_events() == []
    agent.end_registration()
    network.run(1)
    assert registrar.requests[-1].get("expires") == "0"
    assert agent.registration is not None
    assert not agent.registration.is_registered
    assert agent.due_s is None or agent.due_s > network.now_s


def test_a_registrar_that_refuses_is_asked_again_later_and_later(network: Network) -> None:
    registrar = Registrar(network, lambda number, request: respond_to(request, 500 if number < 5 else 403, "r"))
    agent = registering(network)
    network.run(70)  # a fifth of each interval is chance: the last of the four ends after 42 to 63 s
    gaps = [after - before for before, after in zip(registrar.times, registrar.times[1:], strict=False)]
    assert [low for gap, low in zip(gaps, (2, 5, 15, 30), strict=True) if not 0.8 * low <= gap <= 1.2 * low + 1] == []
    network.run(230)
    assert len(registrar.requests) == 5  # a 403 is asked about after five minutes
    network.run(100)
    assert len(registrar.requests) == 6
    details = [event.detail for event in agent.take_events() if isinstance(event, RegistrationChanged)]
    assert details == ["500 Server Internal Error", "403 Forbidden"]


def test_an_interval_that_is_too_brief_is_lengthened(network: Network) -> None:
    def respond(number: int, request: SipRequest) -> SipResponse:
        if request.get("expires") == "60":
            return respond_to(request, 423, "r").add("min-expires", "120")
        return respond_to(request, 200, "r").add("expires", request.get("expires"))

    registrar = Registrar(network, respond)
    agent = registering(network, expires_s=60)
    network.run(1)
    assert [request.get("expires") for request in registrar.requests] == ["60", "120"]
    assert agent.take_events() == [RegistrationChanged(True, "for 120 s")]


@pytest.mark.parametrize("wanted", ["400", "300", "grows", "\u00b2", "1" * 4_000, ""])
def test_a_registrar_that_finds_every_interval_too_brief_is_asked_again_later(network: Network, wanted: str) -> None:
    def respond(number: int, request: SipRequest) -> SipResponse:
        least = str(400 + number) if wanted == "grows" else wanted
        return respond_to(request, 423, "r").add("min-expires", least)

    registrar = Registrar(network, respond)
    agent = registering(network)
    network.run(1)
    assert len(registrar.requests) == (2 if wanted in ("400", "grows") else 1)
    (event,) = agent.take_events()
    assert isinstance(event, RegistrationChanged)
    assert not event.is_registered
    assert agent.due_s is not None


def test_a_registrar_that_is_away_is_found_when_it_is_back(network: Network) -> None:
    agent = registering(network)
    network.run(33)
    assert agent.take_events() == [RegistrationChanged(False, "no response")]
    Registrar(network, lambda number, request: respond_to(request, 200, "r").add("expires", "300"))
    network.run(40)
    assert agent.take_events() == [RegistrationChanged(True, "for 300 s")]
