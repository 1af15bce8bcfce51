"""Print text while its audio is still being sent: python examples/openai_stream.py FILE..."""

import http.client
import sys
import threading
from pathlib import Path

import httpx
import openai


class BothWays(httpx.BaseTransport):
    """Reads the answer while the request is still on its way; httpx by itself sends all of it first."""

    def handle_request(self, request):
        connection = http.client.HTTPConnection(request.url.host, request.url.port)
        connection.putrequest(request.method, request.url.raw_path.decode(), skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.raw:
            connection.putheader(name, value)
        connection.endheaders()
        threading.Thread(target=self.send, args=(connection, request), daemon=True).start()
        answer = connection.getresponse()
        return httpx.Response(answer.status, headers=answer.getheaders(), stream=Answer(connection, answer))

    def send(self, connection, request):
        try:
            for piece in request.stream:
                connection.send(piece)
        except OSError:
            pass  # the server wants no more of it: its answer says why


class Answer(httpx.SyncByteStream):
    def __init__(self, connection, answer):
        self.connection, self.answer = connection, answer

    def __iter__(self):
        return iter(lambda: self.answer.read1(65_536), b"")

    def close(self):
        self.answer.close()
        self.connection.close()


transport = httpx.Client(transport=BothWays())
with openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=transport) as client:
    for path in sys.argv[1:]:
        # The client sends fields before files, so the server knows what is asked when the first second comes.
        events = client.audio.transcriptions.create(
            model="moonshine-tiny-en",
            file=Path(path),
            stream=True,
            extra_body={"silence_schedule": "10000:800,inf:400"},  # shorter segments than usual: text comes earlier
        )
        for event in events:
            if event.type == "transcript.text.delta":
                print(event.delta, end="", flush=True)
        print()
