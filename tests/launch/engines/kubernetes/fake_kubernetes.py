"""A fake Kubernetes API server: it refuses objects that do not fit the schemas, and deletes objects whose owner was
deleted."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import kubernetes_validate

VERSIONS = ("1.34", kubernetes_validate.latest_version().removesuffix(".0"))
_PATH = re.compile(r"/(?:api|apis/\w+)/v1/namespaces/([\w-]+)/(\w+)(?:/([\w.-]+))?(/log)?")


class FakeKubernetes:
    """Its objects, by kind in the plural and name."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {"secrets": {}, "jobs": {}, "deployments": {}, "pods": {}}
        self.namespaces = {"default", "rl"}
        self.forbidden: set[tuple[str, str]] = set()
        self.logs: dict[str, str] = {}

    def names(self) -> list[str]:
        return sorted(f"{kind}/{name}" for kind, held in self.objects.items() for name in held)

    def add_pod(self, name: str, like: dict[str, Any], **status: Any) -> None:
        """A pod that a controller would have made for an object."""
        labels = like["spec"]["template"]["metadata"]["labels"]
        self.objects["pods"][name] = {"metadata": {"name": name, "labels": labels}, "status": status}

    def answer(self, verb: str, url: str, body: Any) -> tuple[int, Any]:
        parts = urlparse(url)
        found = _PATH.fullmatch(parts.path)
        assert found, f"unknown path {url}"
        namespace, kind, name, log = found.groups()
        if (verb, kind) in self.forbidden:
            return 403, {"message": f'{kind} is forbidden: User "me" cannot {verb.lower()} resource "{kind}"'}
        if verb == "POST":
            if namespace not in self.namespaces:
                return 404, {"message": f'namespaces "{namespace}" not found'}
            for version in VERSIONS:
                kubernetes_validate.validate(body, version, strict=True)
            made = {**body, "metadata": {**body["metadata"], "uid": str(uuid.uuid4())}, "status": {}}
            self.objects[kind][body["metadata"]["name"]] = made
            return 201, made
        if name is None:
            wanted = dict(each.split("=") for each in parse_qs(parts.query)["labelSelector"][0].split(","))
            held = self.objects[kind].values()
            return 200, {"items": [each for each in held if wanted.items() <= each["metadata"]["labels"].items()]}
        if name not in self.objects[kind]:
            return 404, {"message": f'{kind} "{name}" not found'}
        if log:
            return 200, self.logs.get(name, "")
        held = self.objects[kind][name]
        if verb == "PATCH":
            _lay_over(held, body)
        if verb == "DELETE":
            del self.objects[kind][name]
            self.collect()
        return 200, held

    def collect(self) -> None:
        """Delete objects until no object has a missing owner."""
        before = self.names()
        there = {each["metadata"].get("uid") for held in self.objects.values() for each in held.values()}
        for held in self.objects.values():
            for name, each in list(held.items()):
                owners = each["metadata"].get("ownerReferences")
                if owners and not any(owner["uid"] in there for owner in owners):
                    del held[name]
        if self.names() != before:
            self.collect()


def _lay_over(held: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(held.get(key), dict):
            _lay_over(held[key], value)
        else:
            held[key] = value


@contextmanager
def serving(folder: Path) -> Iterator[tuple[FakeKubernetes, Path]]:
    """It, and a kubeconfig for it."""
    fake = FakeKubernetes()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            try:
                status, answer = fake.answer(self.command, self.path, body)
            except Exception as error:
                status, answer = 422, {"message": f"invalid: {error}"}
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        file = folder / "kubeconfig"
        file.write_text(kubeconfig(f"http://127.0.0.1:{server.server_port}"))
        try:
            yield fake, file
        finally:
            server.shutdown()
            thread.join()


def kubeconfig(server: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {"name": "first", "context": {"cluster": "c", "user": "u"}},
                {"name": "second", "context": {"cluster": "c", "user": "u", "namespace": "rl"}},
            ],
            "current-context": "first",
        }
    )
