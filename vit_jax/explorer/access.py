"""Who may ask the explorer, and what its page may do.

A page of any site can make a browser send requests to this computer. It cannot read
the answers, unless its own name is made to stand for this computer (DNS rebinding):
then the Host header still has that name. Addresses cannot be rebound. Other users of
this computer, and of its network with --host, lack the token of the printed address.
"""

import hmac
import ipaddress
from collections.abc import Mapping
from email.message import Message
from urllib.parse import urlsplit

from vit_jax.explorer.images import Refused

TOKEN = "token"  # Of the query.

# Of the page and all that it loads: nothing from elsewhere, nothing inline.
HEADERS = {
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


def loopback(host: str) -> bool:
    """Returns whether only this computer can reach a server at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check(headers: Message | Mapping[str, str], served: str, *, api: bool) -> None:
    """Checks where a request comes from.

    Args:
      headers: of the request.
      served: the host of --host.
      api: whether it asks for more than the page's own files, which a link of another
        site may lead to.

    Raises:
      Refused: it may come from another site.
    """
    host = headers.get("Host", "")
    if not _known(host, served):
        raise Refused(
            403,
            f"The address {host!r} is not this server's: open it by its number, as "
            "127.0.0.1, or start it with --host and that name.",
        )
    if not api:
        return
    origin = headers.get("Origin")
    site = headers.get("Sec-Fetch-Site", "same-origin")
    foreign = origin is not None and _place(origin) != host
    if foreign or site not in ("same-origin", "none"):
        raise Refused(403, "Pages of other sites may not ask this server.")


def check_token(headers: Message, query: Mapping[str, str], token: str) -> None:
    """Checks that a request brings the token, in its query or as a cookie.

    Args:
      headers: of the request, checked by `check`.
      query: of its address.
      token: of the server.

    Raises:
      Refused: it brings none, or another.
    """
    given = query.get(TOKEN) or _cookies(headers).get(_cookie_name(headers), "")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise Refused(
            403,
            "This address lacks the server's token: open the whole address that the "
            "server has printed, with all that follows '?'.",
        )


def cookie(headers: Message, token: str) -> str:
    """Returns the Set-Cookie header by which the page's own requests bring the token.

    Args:
      headers: of the request, checked by `check`.
      token: of the server.
    """
    return f"{_cookie_name(headers)}={token}; Path=/; HttpOnly; SameSite=Strict"


def _cookie_name(headers: Message) -> str:
    # A browser sends cookies to every port of a host. Behind a tunnel the port that it
    # knows is another than the server's.
    port = headers["Host"].rpartition(":")[2]
    return f"vit_jax_{port if port.isdecimal() else 80}"


def _cookies(headers: Message) -> dict[str, str]:
    # http.cookies gives up at the first one, of another server, that it cannot read.
    pairs = (pair.partition("=") for pair in headers.get("Cookie", "").split(";"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _place(origin: str) -> str:
    """Returns the host and port of an origin, nothing if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # As of brackets that are not closed.
        return ""


def _known(host: str, served: str) -> bool:
    """Returns whether a Host header names this server."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", served.lower())
    return loopback(name) or not loopback(served)
