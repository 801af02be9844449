"""Servers that people keep data on, started for a test; a proxy before each counts, delays and breaks."""

import hashlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

AZURITE = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every emulator, and no secret."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Say nothing: connections are broken on purpose."""


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class FileHandler(BaseHTTPRequestHandler):
    """Files of a folder, in parts."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.server.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        asked = self.headers.get("Range")
        first, last = 0, len(content) - 1
        if asked:
            low, _, high = asked.removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or last), last)
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.send_header("Content-Length", str(last + 1 - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[first : last + 1])

    do_HEAD = do_GET  # noqa: N815  the name that http.server looks for

    def log_message(self, *told):
        """Say nothing."""


class Proxy(Server):
    """Hands requests on to another port of this machine."""

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.upstream = port
        self.lock = threading.Lock()
        self.latency = 0.0
        self.faults = []
        """What becomes of the next requests for a part of a file: ``503``, ``cut``, ``reset`` or ``slow``."""
        self.forget()

    def forget(self):
        """Count from 0 again."""
        self.num_bytes = self.num_parts = self.num_connections = self.in_flight = self.most_in_flight = 0

    @property
    def port(self):
        return self.server_address[1]

    def process_request(self, request, client_address):
        with self.lock:
            self.num_connections += 1
        super().process_request(request, client_address)


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_part = self.command == "GET" and any(name.lower().endswith("range") for name in self.headers)
        fault = None
        with proxy.lock:
            proxy.in_flight += 1
            proxy.most_in_flight = max(proxy.most_in_flight, proxy.in_flight)
            if is_part and proxy.faults:
                fault = proxy.faults.pop(0)
        try:
            time.sleep(proxy.latency)
            self.answer(body, is_part, fault)
        finally:
            with proxy.lock:
                proxy.in_flight -= 1

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

    def answer(self, body, is_part, fault):
        proxy = self.server
        if fault == "slow":
            time.sleep(0.5)
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "503":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            content = response.read()
        finally:
            upstream.close()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                self.send_header(name, value)
        told = response.getheader("Content-Length", 0) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(told))
        self.end_headers()
        if is_part:
            with proxy.lock:
                proxy.num_parts += 1
                proxy.num_bytes += len(content)
        if fault == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content)

    def log_message(self, *told):
        """Say nothing."""


@contextmanager
def proxied(port):
    with serving(Proxy(port)) as proxy:
        yield proxy


@contextmanager
def http_store(folder):
    """Serve a folder; yield its URL and the proxy."""
    server = Server(("127.0.0.1", 0), FileHandler)
    server.root = Path(folder)
    with serving(server), proxied(server.server_address[1]) as proxy:
        yield f"http://127.0.0.1:{proxy.port}", proxy


@contextmanager
def s3_store(folder):
    """Serve a folder from a bucket of moto's server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    environment = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    with (
        proxied(port) as proxy,
        _environment(environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}),
    ):
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        client.create_bucket(Bucket="bucket")
        for file in _files_of(folder):
            client.put_object(Bucket="bucket", Key=str(file.relative_to(folder)), Body=file.read_bytes())
        client.close()
        try:
            yield "s3://bucket", proxy
        finally:
            server.stop()


@contextmanager
def azure_store(folder, scratch):
    """Serve a folder from a container of azurite."""
    from azure.storage.blob import BlobServiceClient

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    azurite = subprocess.Popen(
        [AZURITE, "--blobPort", str(port), "--location", scratch, "--silent", "--skipApiVersionCheck"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port)
        with proxied(port) as proxy, _environment({"AZURE_STORAGE_CONNECTION_STRING": _azure(proxy.port)}):
            with BlobServiceClient.from_connection_string(_azure(port)) as client:
                container = client.create_container("container")
                for file in _files_of(folder):
                    container.upload_blob(str(file.relative_to(folder)), file.read_bytes())
            yield "abfs://container", proxy
    finally:
        azurite.kill()  # asked nicely, it waits for its connections
        azurite.wait()


def has_azurite():
    """Whether `make` could install it: npm brings it."""
    return AZURITE.exists() and shutil.which("node") is not None


def _azure(port):
    return (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT};"
    )


def _files_of(folder):
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def _wait_for(port):
    for _ in range(300):
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing answers at port {port}")


@contextmanager
def _environment(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
