"""A real S3 server on loopback, which counts what it gives and fails where it is told to."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

SECRET = "wJalrXUtnFEMIexampleonly"


@dataclass
class S3Server:
    """Moto's server behind a counter.

    Attributes:
        host: its URL.
        given: (key, bytes, range that was asked for) of each body that was given.
        fault: called with (method, key) before each request: None, or the status that answers it.
    """

    host: str = ""
    given: list[tuple[str, int, str]] = field(default_factory=list)
    fault: Callable[[str, str], int | None] | None = None

    def bytes_given(self, ending: str = ".npy") -> int:
        """Bytes of objects whose key ends so, since the last `reset`."""
        return sum(size for key, size, _ in self.given if key.endswith(ending))

    def reset(self) -> None:
        self.given, self.fault = [], None

    def around(self, app):
        """Wrap a WSGI application."""

        def counted(environ, start_response):
            method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            given = self.given  # of a process that was killed, a request may end after the next test began
            status = self.fault(method, key) if self.fault is not None else None
            if status is not None:
                start_response(f"{status} fault", [("Content-Length", "0")])
                return [b""]
            body = b"".join(app(environ, start_response))
            if method == "GET":
                given.append((key, len(body), environ.get("HTTP_RANGE", "")))
            return [body]

        return counted


@contextmanager
def s3_server(address: str = "127.0.0.1"):
    """Serve S3 in a thread; servers of one process have the same objects."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type, message, *args):
            pass

    counted = S3Server()
    app = counted.around(DomainDispatcherApplication(create_backend_app))
    server = make_server(address, 0, app, threaded=True, request_handler=Quiet)
    counted.host = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield counted
    finally:
        server.shutdown()
        thread.join()
