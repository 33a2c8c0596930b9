"""Finding the head of a running cluster and asking it, before Ray is imported, to let us in."""

import importlib
import os
import socket
from pathlib import Path
from typing import Any

PROBE_SECONDS = 5.0


def gcs_address(address: str) -> str:
    """HOST:PORT of the head that `--address` means."""
    if address == "auto":
        found = os.environ.get("RAY_ADDRESS", "")
        current = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
        if not found and current.is_file():
            found = current.read_text().strip()
        if not found:
            raise ValueError(
                "no Ray cluster runs on this machine: start one (`ray start --head`), name one "
                "with --address HOST:PORT, or leave out --address for a local one"
            )
        address = found
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ValueError(f"--address is '{address}': expected local, auto or HOST:PORT of the head")
    return address


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
        raise ValueError(f"what answers at {gcs} is no Ray head ({answer})")
    if _check_alive(gcs, "") == "OK" and not insecure:
        raise ValueError(
            f"the cluster at {gcs} lets anyone in who can reach it: start it with "
            "RAY_AUTH_MODE=token, or accept that with --insecure-cluster"
        )
    os.environ["RAY_AUTH_MODE"] = "token" if token else "disabled"


def our_token() -> str:
    """The token Ray would use: from the environment, a named file, or the home folder."""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token.strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip()
    except OSError:
        if named:
            raise ValueError(f"RAY_AUTH_TOKEN_PATH names '{named}', which cannot be read") from None
        return ""


def _check_alive(gcs: str, token: str) -> str:
    """One call without side effects; the name of its gRPC status."""
    grpc: Any = importlib.import_module("grpc")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(gcs, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            call(b"", timeout=PROBE_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
