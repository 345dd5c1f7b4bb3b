"""An operations port that answers what a test tells it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

Answer = tuple[int, bytes]


class OperationsPort(HTTPServer):
    """`answers`: path with query -> what is answered, one after the other, the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, *bodies: bytes, status: int = 200) -> None:
        self.answers[path] = [(status, body) for body in bodies]

    def take(self, path: str) -> Answer:
        answers = self.answers.get(path, [(404, b"not here")])
        return answers.pop(0) if len(answers) > 1 else answers[0]


class _Handler(BaseHTTPRequestHandler):
    """A key that is sent must be the right one."""

    server: OperationsPort

    def do_GET(self) -> None:
        status, body = self.server.take(self.path)
        if self.headers["Authorization"] not in {None, "Bearer right"}:
            status, body = 401, b'{"error": {"message": "A valid API key is needed."}}'
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def open_port() -> Iterator[OperationsPort]:
    with OperationsPort() as port:
        thread = threading.Thread(target=port.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield port
        port.shutdown()
        thread.join()
