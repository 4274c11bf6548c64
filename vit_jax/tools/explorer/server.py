"""The explorer's HTTP server: the page and its data.

GET  /, /NAME                               the page and its files
GET  /api/about                             models, limits and names of images
GET  /api/thumbnail?name=                   thumbnail of an image of the folder, JPEG
GET  /api/picture?image=KEY&model=          a model's input, PNG
GET  /api/row?image=KEY&model=&query=       attention from a token, see AttentionRows
GET  /api/relevance?image=KEY&model=&class= relevance of each patch to a class, float32
GET  /api/relevance?image=KEY&model=&text=  relevance of each patch to a text, float32
GET  /api/similarity?image=KEY&model=&from=KEY&patch=
                                            similarity of each patch to one, float32
GET  /api/components?image=KEY&model=       components of patch features as colours, PNG
GET  /api/mask?image=KEY&model=             colours of the classes of pixels, PNG
GET  /api/page?image=KEY&name=              the page of one image, HTML
POST /api/open?name=                        runs the models on an image of the folder
POST /api/see?name=                         runs the models on the image in the body

Each request needs the token of the printed address, either as `token` in its query or
as the cookie that is set by the answer to such a request. A rejected request is
answered with {"error": one sentence}.

A page of any site can make a browser send requests to this computer. It cannot read the
answers, unless its host name is made to resolve to this computer (DNS rebinding), but
then the Host header still has that name. Addresses cannot be rebound. Other users of
this computer, and of its network with --host, do not have the token of the printed
address.
"""

import hmac
import http.server
import ipaddress
import json
import secrets
import socket
import sys
from collections.abc import Mapping
from email.message import Message
from urllib.parse import parse_qs, urlsplit

from vit_jax.errors import UserError
from vit_jax.tools.explorer import images, saved
from vit_jax.tools.explorer.images import MAX_BYTES, Folder, Refused
from vit_jax.tools.explorer.session import ModelOutput, Session

_BINARY = "application/octet-stream"
_TOKEN = "token"  # Key in the query.
_MAX_TEXT = 1_000  # Maximum number of characters of a text.

# Headers of every answer: the page loads nothing from other servers and nothing inline.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class Server(http.server.ThreadingHTTPServer):
    """Serves a session until `shutdown`.

    Args:
      session: the models and their outputs.
      host: address or name to listen on.
      port: port to listen on; 0 for any free one, which `server_port` then holds.

    Raises:
      UserError: the server cannot listen on the address.
    """

    request_queue_size = 128

    def __init__(self, session: Session, host: str, port: int):
        # Hexadecimal, because terminals drop punctuation at the end of a link.
        self.token, self.assets = secrets.token_hex(16), saved.assets()
        self.session, self.host = session, host
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--host={host} --port={port} cannot be served: {error}; --port=0 "
                "uses a free port"
            ) from error

    @property
    def address(self) -> str:
        """URL for a browser; anyone with its token can use the server."""
        host = "127.0.0.1" if self.host in ("", "0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/?{_TOKEN}={self.token}"

    def handle_error(self, request, client_address) -> None:
        """Reports errors, except for connections that were closed in the meantime."""
        dropped = isinstance(sys.exception(), ConnectionError | TimeoutError)
        # Ctrl-C during the start of a thread makes socketserver close its connection.
        if not dropped and request.fileno() >= 0:
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"  # Keeps the connection for the next click.
    timeout = 30  # Seconds without a byte after which a connection is closed.
    # Otherwise, the body would wait 40 ms for the headers to be acknowledged.
    disable_nagle_algorithm = True

    def version_string(self) -> str:
        """Returns only the name, without versions."""
        return "vit_jax"

    def log_message(self, format, *args) -> None:
        """Prints nothing: a line per click would be useless."""

    def do_GET(self) -> None:
        """Answers requests that only read."""
        self._answer(
            {
                "/api/about": self._about,
                "/api/thumbnail": self._thumbnail,
                "/api/picture": self._picture,
                "/api/row": self._row,
                "/api/relevance": self._relevance,
                "/api/similarity": self._similarity,
                "/api/components": self._components,
                "/api/mask": self._mask,
                "/api/page": self._page,
            }
        )

    def do_POST(self) -> None:
        """Answers requests that run the models on an image."""
        self._answer({"/api/open": self._run_from_folder, "/api/see": self._run_upload})

    def _answer(self, routes) -> None:
        self.query, self.unread = {}, _to_int(self.headers.get("Content-Length", ""))
        # The unread part of a body would be parsed as the next request.
        self.close_connection |= "Content-Length" in self.headers
        self.close_connection |= "Transfer-Encoding" in self.headers
        try:
            path = self._parse_path()
            api = path.startswith("/api/")
            check_origin(self.headers, self.server.host, api=api)
            check_token(self.headers, self.query, self.server.token)
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
            self._refuse(500, "The server failed; see its terminal for the error.")
            raise

    def _parse_path(self) -> str:
        """Returns the path and sets `query`."""
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query)
        except ValueError as error:  # For example, an open bracket.
            raise Refused(400, f"{self.path[:99]!r} is not an address.") from error
        self.query = {name: values[-1] for name, values in query.items()}
        return address.path

    def _about(self):
        return _json(self.server.session.about())

    def _thumbnail(self):
        return "image/jpeg", self._folder.thumbnail(self.query.get("name", ""))

    def _picture(self):
        return "image/png", self._output().picture

    def _row(self):
        rows, query = self._output().rows, self._number("query")
        if query >= rows.num_queries:
            raise Refused(404, f"Token {query} does not exist.")
        return _BINARY, rows.to_bytes(query)

    def _relevance(self):
        target = self.query.get("text", "")[:_MAX_TEXT] or self._number("class")
        values = self.server.session.relevance(*self._image_and_model(), target)
        return _BINARY, values.astype("<f4").tobytes()

    def _similarity(self):
        values = self.server.session.similarity(
            *self._image_and_model(),
            self.query.get("from", ""),
            self._number("patch"),
        )
        return _BINARY, values.astype("<f4").tobytes()

    def _components(self):
        return "image/png", self.server.session.components(*self._image_and_model())

    def _mask(self):
        if not (mask := self._output().mask):
            raise Refused(404, f"Model {self.query['model']} has no segmentation head.")
        return "image/png", mask

    def _page(self):
        session, name = self.server.session, self.query.get("name", "The image")[:200]
        outputs = session.outputs(self.query.get("image", ""))
        return _BINARY, saved.build(session.models, outputs, name)[0]

    def _run_from_folder(self):
        name = self.query.get("name", "")
        return _json(self.server.session.run(self._folder.read(name), name))

    def _run_upload(self):
        name = self.query.get("name", "The image")[:200]
        return _json(self.server.session.run(self._body(name), name))

    @property
    def _folder(self) -> Folder:
        if self.server.session.folder is None:
            raise Refused(404, "No folder was chosen: start with --images=FOLDER.")
        return self.server.session.folder

    def _image_and_model(self) -> tuple[str, int]:
        return self.query.get("image", ""), self._number("model")

    def _output(self) -> ModelOutput:
        return self.server.session.output(*self._image_and_model())

    def _number(self, name: str) -> int:
        number = _to_int(self.query.get(name, ""))
        if number is None:
            text = self.query.get(name, "")[:20]
            raise Refused(400, f"{name}={text!r} is not a whole number.")
        return number

    def _body(self, name: str) -> bytes:
        size = self.unread
        if size is None:
            raise Refused(411, "The request does not have a Content-Length.")
        if size > MAX_BYTES:
            raise images.too_large(size, name)
        data, self.unread = self.rfile.read(size), 0
        if len(data) < size:
            raise ConnectionResetError("the upload was interrupted")
        return data

    def _refuse(self, status: int, sentence: str) -> None:
        self.close_connection = True
        self._send(status, *_json({"error": sentence}))

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status == 200 and _TOKEN in self.query:
            cookie = f"{_cookie_name(self.headers)}={self.server.token}"
            cookie += "; Path=/; HttpOnly; SameSite=Strict"
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(content)
        # A client that is still sending its request reads the answer only afterwards.
        self.rfile.read(min(self.unread or 0, MAX_BYTES))


def _to_int(text: str) -> int | None:
    known = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if known else None


def _json(content: dict) -> tuple[str, bytes]:
    return "application/json", json.dumps(content).encode()


def is_loopback(host: str) -> bool:
    """Returns whether only this computer can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_origin(
    headers: Message | Mapping[str, str], served: str, *, api: bool
) -> None:
    """Checks the site that a request comes from.

    Args:
      headers: headers of the request.
      served: value of --host.
      api: False for the page and its files, which other sites may link to.

    Raises:
      Refused: the request may come from another site.
    """
    host = headers.get("Host", "")
    if not _is_this_server(host, served):
        raise Refused(
            403,
            f"The address {host!r} is not this server's: open it by its number, such as "
            "127.0.0.1, or start it with --host and that name.",
        )
    if not api:
        return
    origin = headers.get("Origin")
    site = headers.get("Sec-Fetch-Site", "same-origin")
    foreign = origin is not None and _origin_host(origin) != host
    if foreign or site not in ("same-origin", "none"):
        raise Refused(403, "Pages of other sites may not use this server.")


def check_token(headers: Message, query: Mapping[str, str], token: str) -> None:
    """Checks that a request has the token, in its query or as a cookie.

    Args:
      headers: headers of the request, checked by `check_origin`.
      query: query of the request's URL.
      token: token of the server.

    Raises:
      Refused: the token is missing or wrong.
    """
    # http.cookies stops at the first cookie that it cannot read, which may have been
    # set by another server.
    pairs = (pair.partition("=") for pair in headers.get("Cookie", "").split(";"))
    cookies = {name.strip(): value.strip() for name, _, value in pairs}
    given = query.get(_TOKEN) or cookies.get(_cookie_name(headers), "")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise Refused(
            403,
            "This address lacks the server's token: open the whole address that the "
            "server has printed, including everything after '?'.",
        )


def _cookie_name(headers: Message) -> str:
    # The port is part of the name because browsers send cookies to every port of a
    # host. Through a tunnel, the browser's port differs from the server's.
    port = headers["Host"].rpartition(":")[2]
    return f"vit_jax_{port if port.isdecimal() else 80}"


def _origin_host(origin: str) -> str:
    """Returns the host and port of an origin; "" if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # For example, an open bracket.
        return ""


def _is_this_server(host: str, served: str) -> bool:
    """Returns whether a Host header names this server."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", served.lower())
    return is_loopback(name) or not is_loopback(served)
