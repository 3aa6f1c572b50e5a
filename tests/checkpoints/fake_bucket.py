"""A stand-in for Google Cloud Storage: objects in memory behind as much of its JSON API as run folders call.

    python tests/checkpoints/fake_bucket.py PORT_FILE

writes its port to PORT_FILE. What it does not know it answers with 501, and the caller fails.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c  # pyright: ignore[reportMissingImports]


class Bucket:
    """Objects by bucket and name, each with its generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self._generation = 0

    def put(self, bucket: str, name: str, data: bytes, expected: str | None = None) -> dict[str, Any] | None:
        """The object's metadata, or None where another generation lies than the expected one (0: none)."""
        with self._lock:
            there = self._objects.get((bucket, name), (b'', 0))[1]
            if expected is not None and int(expected) != there:
                return None
            self._generation += 1
            self._objects[bucket, name] = (data, self._generation)
        return self.describe(bucket, name)

    def get(self, bucket: str, name: str) -> tuple[bytes, int] | None:
        return self._objects.get((bucket, name))

    def delete(self, bucket: str, name: str) -> bool:
        return self._objects.pop((bucket, name), None) is not None

    def describe(self, bucket: str, name: str) -> dict[str, Any]:
        data, generation = self._objects[bucket, name]
        time = '2026-01-01T00:00:00.000Z'
        return {
            'kind': 'storage#object', 'id': f'{bucket}/{name}/{generation}', 'bucket': bucket, 'name': name,
            'generation': str(generation), 'metageneration': '1', 'size': str(len(data)), 'etag': str(generation),
            'crc32c': _encode(google_crc32c.Checksum(data).digest()), 'md5Hash': _encode(hashlib.md5(data).digest()),
            'timeCreated': time, 'updated': time, 'contentType': 'application/octet-stream',
        }  # fmt: skip

    def find(self, bucket: str, prefix: str, delimiter: str, start: str, end: str) -> dict[str, Any]:
        """The objects whose names begin so, those deeper than `delimiter` only as prefixes."""
        items, prefixes = [], set()
        for owner, name in sorted(self._objects):
            if owner == bucket and name.startswith(prefix) and name >= start and (not end or name < end):
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ('', '', '')
                if found:
                    prefixes.add(prefix + head + delimiter)
                else:
                    items.append(self.describe(bucket, name))
        return {'kind': 'storage#objects', 'items': items, 'prefixes': sorted(prefixes)}


def _encode(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


BUCKET = Bucket()
UPLOADS: dict[str, tuple[str, bytes]] = {}  # begun, by id: the object's name and what has come


class Requests(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, url.path)
            if match and method == self.command:
                answer(self, [unquote(part) for part in match.groups()], query, body)
                return
        self.answer(501, {'error': {'code': 501, 'message': f'{self.command} {self.path} is not known here'}})

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - as the library calls them

    def answer(self, code: int, content: dict[str, Any] | bytes = b'', **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in ({'Content-Type': 'application/json', 'Content-Length': str(len(data))} | headers).items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        self.wfile.write(data)

    def describe_bucket(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        self.answer(200, {'kind': 'storage#bucket', 'name': names[0], 'hierarchicalNamespace': {'enabled': False}})

    def find(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        where = [query.get(name, '') for name in ('prefix', 'delimiter', 'startOffset', 'endOffset')]
        self.answer(200, BUCKET.find(names[0], *where))

    def read(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        found = BUCKET.get(*names)
        if found is None:
            self.answer(404, {'error': {'code': 404, 'message': 'No such object'}})
        elif query.get('alt') != 'media':
            self.answer(200, BUCKET.describe(*names))
        else:
            self._send_range(*found)

    def _send_range(self, data: bytes, generation: int) -> None:
        headers = {'Content_Type': 'application/octet-stream', 'x_goog_generation': str(generation)}
        match = re.fullmatch(r'bytes=(\d*)-(\d*)', self.headers.get('Range', ''))
        if match is None:
            return self.answer(200, data, **headers)
        first = int(match[1]) if match[1] else max(0, len(data) - int(match[2]))
        last = min(int(match[2]) if match[1] and match[2] else len(data), len(data) - 1)
        if first > last:
            return self.answer(416)
        headers['Content_Range'] = f'bytes {first}-{last}/{len(data)}'
        return self.answer(206, data[first : last + 1], **headers)

    def delete(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        self.answer(204 if BUCKET.delete(*names) else 404)

    def copy(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        data, _ = BUCKET.get(*names[:2]) or (b'', 0)
        self.answer(200, {'done': True, 'resource': BUCKET.put(*names[2:], data)})

    def upload(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        kind, (bucket,), number = query['uploadType'], names, query.get('upload_id')
        if kind == 'media':
            self._put(bucket, query['name'], body, query)
        elif kind == 'multipart':
            boundary = re.search(r'boundary="?\'?([^"\';]+)', self.headers['Content-Type'])
            assert boundary is not None
            about, content = (part.split(b'\n\n', 1)[-1] for part in self._parts(body, boundary[1].encode()))
            self._put(bucket, json.loads(about)['name'], content, query)
        elif number is None:
            number = uuid.uuid4().hex
            UPLOADS[number] = (json.loads(body or b'{}').get('name') or query['name'], b'')
            where = f'http://{self.headers["Host"]}/upload/storage/v1/b/{bucket}/o'
            self.answer(200, Location=f'{where}?uploadType=resumable&upload_id={number}')
        else:
            name, before = UPLOADS[number]
            UPLOADS[number] = (name, before + body)
            if self.headers.get('Content-Range', '').endswith('/*'):
                self.answer(308, Range=f'bytes=0-{len(before + body) - 1}')
            else:
                self._put(bucket, name, before + body, {})

    @staticmethod
    def _parts(body: bytes, boundary: bytes) -> list[bytes]:
        """The two parts of a multipart body, line ends before them and after them taken off."""
        return [re.sub(rb'\r?\n\r?\n', b'\n\n', part, count=1).removesuffix(b'\n').removesuffix(b'\r')
                for part in body.split(b'--' + boundary)[1:3]]  # fmt: skip

    def _put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> None:
        described = BUCKET.put(bucket, name, data, query.get('ifGenerationMatch'))
        if described is None:
            self.answer(412, {'error': {'code': 412, 'message': 'another generation is there'}})
        else:
            self.answer(200, described)

    def delete_several(self, names: list[str], query: dict[str, str], body: bytes) -> None:
        answers = []
        for part in body.split(b'--')[1:]:
            target = re.search(rb'DELETE \S*/storage/v1/b/([^/]+)/o/([^/? ]+)', part)
            number = re.search(rb'Content-ID: <?([^>\r\n]+)', part, re.IGNORECASE)
            if target and number:
                code = (
                    '204 No Content' if BUCKET.delete(*(unquote(p.decode()) for p in target.groups())) else '404 None'
                )
                head = f'Content-Type: application/http\r\nContent-ID: <response-{number[1].decode()}>'
                answers.append(f'--part\r\n{head}\r\n\r\nHTTP/1.1 {code}\r\nContent-Length: 0\r\n\r\n\r\n')
        self.answer(200, f'{"".join(answers)}--part--'.encode(), Content_Type='multipart/mixed; boundary=part')


Answer = Callable[[Requests, list[str], dict[str, str], bytes], None]
_OBJECT = r'/storage/v1/b/([^/]+)/o/([^/]+)'
ROUTES: tuple[tuple[str, str, Answer], ...] = (
    ('GET', r'/storage/v1/b/([^/]+)(?:/storageLayout)?', Requests.describe_bucket),
    ('GET', r'/storage/v1/b/([^/]+)/o', Requests.find),
    ('GET', rf'(?:/download)?{_OBJECT}', Requests.read),
    ('DELETE', _OBJECT, Requests.delete),
    ('POST', rf'{_OBJECT}/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)', Requests.copy),
    ('POST', r'/upload/storage/v1/b/([^/]+)/o', Requests.upload),
    ('PUT', r'/upload/storage/v1/b/([^/]+)/o', Requests.upload),
    ('POST', r'/batch/storage/v1', Requests.delete_several),
)


def main() -> None:
    server = ThreadingHTTPServer(('127.0.0.1', 0), Requests)
    server.daemon_threads = True
    Path(sys.argv[1]).write_text(str(server.server_address[1]))
    server.serve_forever()


if __name__ == '__main__':
    main()
