"""Finding the head of a running cluster and asking it, before Ray is imported, to let us in."""

import importlib
import os
import socket
from pathlib import Path
from typing import Any

PROBE_SECONDS = 5.0

TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
"""Ray's settings for TLS; a node shows the same certificate as a server and as a client."""


def gcs_address(address: str) -> str:
    """HOST:PORT of the head that `--address` means."""
    named, forms = "--address", "local, auto or HOST:PORT"
    if address == "auto":
        named, forms, address = _running()
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or "/" in host:
        raise ValueError(f"{named} is '{address}': expected {forms} of the head")
    return address


def _running() -> tuple[str, str, str]:
    """Where the address of this machine's cluster was found, what may be there, and what is."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        return "RAY_ADDRESS", "auto or HOST:PORT", address
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    current = Path(folder) / "ray" / "ray_current_cluster"
    if not current.is_file():
        raise ValueError(
            "no Ray cluster runs on this machine: start one (`ray start --head`), name one "
            "with --address HOST:PORT, or leave out --address for a local one"
        )
    return f"the address in '{current}'", "HOST:PORT", current.read_text(errors="replace").strip()


def probe(gcs: str, *, insecure: bool) -> None:
    """Find out within seconds whether the head answers, knows our token and asks for one."""
    host, _, port = gcs.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray head answers at {gcs} ({error}): check host, port (6379 by default) and "
            "firewall"
        ) from None
    token = our_token()
    answer = _check_alive(gcs, token)
    if answer == "UNAUTHENTICATED":
        raise ValueError(
            f"the cluster at {gcs} refuses "
            + ("this token" if token else "to be used without a token")
            + ": set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        )
    if answer != "OK":
        advice = (
            f"check that '{os.environ['RAY_TLS_CA_CERT']}' (RAY_TLS_CA_CERT) has signed its "
            "certificate for this host, or unset RAY_USE_TLS if it does not use TLS"
            if _use_tls()
            else f"if it uses TLS, set RAY_USE_TLS=1, {', '.join(TLS_FILES)}"
        )
        raise ValueError(f"what answers at {gcs} is no Ray head ({answer}): {advice}")
    if _check_alive(gcs, "") == "OK" and not insecure:
        raise ValueError(
            f"the cluster at {gcs} lets anyone in who can reach it: start it with "
            "RAY_AUTH_MODE=token, or accept that with --insecure-cluster"
        )
    os.environ["RAY_AUTH_MODE"] = "token" if token else "disabled"


def our_token() -> str:
    """The token Ray would use: from the environment, a named file, or the home folder."""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return _plain(token, "RAY_AUTH_TOKEN")
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        content = path.read_bytes()
    except OSError:
        if named:
            raise ValueError(f"RAY_AUTH_TOKEN_PATH names '{named}', which cannot be read") from None
        return ""
    return _plain(content.decode("latin-1"), f"the token file '{path}'")


def _plain(token: str, source: str) -> str:
    """The token without blanks around it; what could not travel in a header is refused."""
    token = token.strip()
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(
            f"{source} holds no token: blanks, line breaks or characters that are not ASCII lie "
            "within; copy the cluster's token there again"
        )
    return token


def _channel(grpc: Any, gcs: str) -> Any:
    options = [("grpc.enable_http_proxy", 0)]
    if not _use_tls():
        return grpc.insecure_channel(gcs, options=options)
    certificate, key, authority = map(_pem, TLS_FILES)
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(gcs, credentials, options=options)


def _use_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true")


def _pem(name: str) -> bytes:
    path = os.environ.get(name, "")
    if not path:
        raise ValueError(f"RAY_USE_TLS is set, but {name} is not: Ray wants {', '.join(TLS_FILES)}")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} names '{path}', which cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise ValueError(f"{name} names '{path}', which is no PEM file")
    return content


def _check_alive(gcs: str, token: str) -> str:
    """One call without side effects; the name of its gRPC status."""
    grpc: Any = importlib.import_module("grpc")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with _channel(grpc, gcs) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            call(b"", timeout=PROBE_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
