"""The explorer's HTTP server: the page, and what it asks for.

GET  /, /NAME                               the page and its files
GET  /api/about                             models, limits and names of images
GET  /api/thumbnail?name=                   of an image of the folder, a JPEG file
GET  /api/picture?image=KEY&model=          what a model saw, a PNG file
GET  /api/row?image=KEY&model=&query=       where a token looks, see rows.py
POST /api/open?name=                        looks at an image of the folder
POST /api/see?name=                         looks at the image that is the body

Each request must bring the token of the printed address, as `token` of its query or as
the cookie that the answer to such a request sets. What is refused is answered with
{"error": one sentence}.
"""

import http.server
import io
import json
import secrets
import socket
import sys
from urllib.parse import parse_qs, urlsplit

from vit_jax.errors import UserError
from vit_jax.explorer import access, images, saved
from vit_jax.explorer.connections import MOST, Connections, Timed
from vit_jax.explorer.images import MAX_BYTES, Refused
from vit_jax.explorer.session import Session
from vit_jax.explorer.thumbnails import Thumbnails

_JSON, _BINARY = "application/json", "application/octet-stream"
_READING = 30  # Seconds that the other side has to read an answer.
_CHUNK = 1 << 20


class Server(http.server.ThreadingHTTPServer):
    """Serves a session until `shutdown`.

    Args:
      session: to ask.
      host: address or name to listen at.
      port: 0 is any that is free; `server_port` tells which.

    Raises:
      UserError: it cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 2 * MOST

    def __init__(self, session: Session, host: str, port: int):
        # Hexadecimal, as terminals leave out punctuation at the end of a link.
        self.token, self.connections = secrets.token_hex(16), Connections()
        self.session, self.host, self.assets = session, host, saved.assets()
        self.thumbnails = Thumbnails(session.folder) if session.folder else None
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--host={host} --port={port} cannot be served: {error}; --port=0 "
                "takes a port that is free"
            ) from error

    @property
    def address(self) -> str:
        """What to open in a browser: whoever has it may use the server."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/?{access.TOKEN}={self.token}"

    def verify_request(self, request, client_address) -> bool:
        """Closes a connection for which there is no room."""
        return self.connections.admit(request)

    def shutdown_request(self, request) -> None:
        """Closes a connection and gives its place free."""
        super().shutdown_request(request)
        self.connections.end(request)

    def handle_error(self, request, client_address) -> None:
        """Keeps quiet on connections that browsers drop."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    server: Server
    protocol_version = "HTTP/1.1"  # Keeps the connection for the next click.
    # Or what is sent after the headers would wait for their receipt: 40 ms.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Has all that is read be read in time."""
        super().setup()
        self.rfile.close()
        self.timed = Timed(self.connection)
        self.rfile = io.BufferedReader(self.timed)

    def handle_one_request(self) -> None:
        """Waits for a request, then has all of it come in time."""
        self.server.connections.wait(self.connection)
        self.timed.allow()
        self.rfile.peek(1)
        self.timed.allow()
        super().handle_one_request()

    def version_string(self) -> str:
        """Leaves the versions out."""
        return "vit_jax"

    def log_message(self, format, *args) -> None:
        """Is silent: a line a click would help nobody."""

    def do_GET(self) -> None:
        """Answers what only reads."""
        self._answer(
            {
                "/api/about": self._about,
                "/api/thumbnail": self._thumbnail,
                "/api/picture": self._picture,
                "/api/row": self._row,
            }
        )

    def do_POST(self) -> None:
        """Answers what makes the models look at an image."""
        self._answer({"/api/open": self._open, "/api/see": self._see})

    def _answer(self, routes) -> None:
        self._measure()
        try:
            path = self._split()
            api = path.startswith("/api/")
            access.check(self.headers, self.server.host, api=api)
            access.check_token(self.headers, self.query, self.server.token)
            self.server.connections.work(self.connection)
            asset = self.server.assets.get(path.lstrip("/") or saved.PAGE)
            if path in routes:
                self._send(200, *routes[path]())
            elif asset and self.command == "GET":
                self._send(200, *asset)
            else:
                raise Refused(404, f"There is nothing at {path[:99]}.")
        except Refused as error:
            self._refuse(error.status, error.sentence)
        except UserError as error:
            self._refuse(500, f"{error}.")
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            self._refuse(500, "The server failed; its terminal says how.")
            raise

    def _measure(self) -> None:
        """Finds out how long the body is."""
        length = self.headers.get("Content-Length", "")
        known = length.isascii() and length.isdecimal() and len(length) < 20
        chunked = "Transfer-Encoding" in self.headers
        self.length = int(length) if known and not chunked else None
        self.unread = self.length or 0
        if chunked or (length and not known):
            self.close_connection = True  # Nobody knows where the next request begins.

    def _split(self) -> str:
        """Returns the path, and keeps the query."""
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query)
        except ValueError as error:  # As of brackets that are not closed.
            raise Refused(400, f"{self.path[:99]!r} is no address.") from error
        self.query = {name: values[-1] for name, values in query.items()}
        return address.path

    def _about(self):
        return _json(self.server.session.about())

    def _thumbnail(self):
        self._check_folder()
        return "image/jpeg", self.server.thumbnails.of(self.query.get("name", ""))

    def _picture(self):
        return "image/png", self._seen().picture

    def _row(self):
        rows, query = self._seen().rows, self._number("query")
        if query >= len(rows.levels):
            raise Refused(404, f"There is no token {query}.")
        return _BINARY, rows.of(query)

    def _open(self):
        return _json(self.server.session.see(self._from_folder(), self.query["name"]))

    def _see(self):
        name = self.query.get("name", "The image")[:200]
        return _json(self.server.session.see(self._body(name), name))

    def _check_folder(self) -> None:
        if self.server.session.folder is None:
            raise Refused(404, "No folder was chosen: start with --images=FOLDER.")

    def _from_folder(self) -> bytes:
        self._check_folder()
        return self.server.session.folder.read(self.query.get("name", ""))

    def _seen(self):
        return self.server.session.seen(
            self.query.get("image", ""), self._number("model")
        )

    def _number(self, name: str) -> int:
        text = self.query.get(name, "")
        if not (text.isascii() and text.isdecimal() and len(text) < 9):
            raise Refused(400, f"{name}={text[:20]!r} is not a whole number.")
        return int(text)

    def _body(self, name: str) -> bytes:
        size = self.length
        if size is None:
            raise Refused(411, "The request does not say how long it is.")
        if size > MAX_BYTES:
            raise images.too_large(size, name)
        data = bytearray()
        while len(data) < size:
            self.timed.allow()  # A slow link may need longer for many mebibytes.
            part = self.rfile.read(min(_CHUNK, size - len(data)))
            if not part:
                raise ConnectionResetError("the upload was broken off")
            data += part
        self.unread = 0
        return bytes(data)

    def _refuse(self, status: int, sentence: str) -> None:
        self.close_connection = True
        self._send(status, *_json({"error": sentence}))

    def _send(self, status: int, kind: str, content: bytes) -> None:
        if self.unread:  # Or it would be taken for the next request.
            self.close_connection = True
        self.connection.settimeout(_READING)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in access.HEADERS.items():
            self.send_header(name, value)
        if status == 200 and access.TOKEN in self.query:
            cookie = access.cookie(self.headers, self.server.token)
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(content)
        # Whoever has not sent all of a request may not come to read its answer.
        self.timed.allow()
        for _ in range(0, min(self.unread, 4 * MAX_BYTES), _CHUNK):
            if not self.rfile.read(min(_CHUNK, self.unread)):
                break
            self.unread -= _CHUNK


def _json(content: dict) -> tuple[str, bytes]:
    return _JSON, json.dumps(content).encode()
