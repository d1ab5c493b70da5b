"""A local server with the interface of Azure Blob Storage, as its reference describes it.

https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api
"""

import base64
import hashlib
import hmac
import re
from email.utils import formatdate
from urllib.parse import unquote, urlsplit

from object_server_base import ObjectHandler, ObjectServer, RefusalError, xml

ACCOUNT = "accountoftests"
KEY = base64.b64encode(b"key of tests").decode()
WRONG_KEY = base64.b64encode(b"hidden key of tests").decode()
# the headers of a signature, in its order
SIGNED = ["Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type"]
SIGNED += ["Date", "If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"]


def signature(method, path, query, headers):
    """Return the signature of a request by the account's shared key."""
    lines = [method, *(headers.get(name, "") for name in SIGNED)]
    if lines[3] == "0":
        lines[3] = ""
    lower_headers = {name.lower(): value for name, value in headers.items()}
    lines += [
        f"{name}:{lower_headers[name]}"
        for name in sorted(lower_headers)
        if name.startswith("x-ms-")
    ]
    lines += [f"/{ACCOUNT}{path}"] + [f"{name}:{query[name]}" for name in sorted(query)]
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
    return base64.b64encode(digest).decode()


class AzureHandler(ObjectHandler):
    no_bucket, no_object = "ContainerNotFound", "BlobNotFound"

    def check_credentials(self):
        path = urlsplit(self.path).path
        expected = signature(self.command, path, self.query, self.headers)
        if self.headers.get("Authorization") != f"SharedKey {ACCOUNT}:{expected}":
            raise RefusalError(403, "AuthenticationFailed")

    @staticmethod
    def e_tag_of(data, number):
        return f'"0x{number:X}"'  # another one for each write

    def answer_request(self):
        part = self.query.get("comp")
        if part == "list":
            return self.list()
        if part == "batch":
            return self.delete_batch()
        if self.command in ("GET", "HEAD"):
            return self.read()
        if self.command == "DELETE":
            if self.server.refuses_deletions:
                raise RefusalError(403, "AuthorizationPermissionMismatch")
            self.found()  # a missing blob is an error: 404
            del self.server.objects[self.key]
            return 202, {}, b""
        self.check_conditions()
        if part == "block":
            self.server.uploads.setdefault(self.key, {})[self.query["blockid"]] = self.body
            return 201, {}, b""
        if part == "blocklist":
            return 201, self.headers_of(self.write(self.joined_blocks())), b""
        if self.headers.get("x-ms-blob-type") != "BlockBlob":
            raise RefusalError(400, "MissingRequiredHeader")
        self.server.uploads.pop(self.key, None)  # a write discards blocks without a list
        return 201, self.headers_of(self.write(self.body)), b""

    def check_conditions(self):
        """Refuse a write by its conditions: 409 if a blob exists, 412 if it has another ETag."""
        live = self.server.objects.get(self.key)
        if self.headers.get("If-None-Match") == "*" and live:
            raise RefusalError(409, "BlobAlreadyExists")
        e_tag = self.headers.get("If-Match")
        if e_tag is not None and (live is None or e_tag != live.e_tag):
            raise RefusalError(412, "ConditionNotMet")

    def joined_blocks(self):
        """Return the bytes of the listed blocks; discard the others."""
        blocks = self.server.uploads.pop(self.key, {})
        names = re.findall(r"<(?:Uncommitted|Latest)>(.*?)</", self.body.decode())
        if not set(names) <= set(blocks):
            raise RefusalError(400, "InvalidBlockList")
        return b"".join(blocks[name] for name in names)

    def list(self):
        assert self.query["restype"] == "container"
        keys, folders, following = self.page("marker")
        parts = [f"<BlobPrefix><Name>{entry}</Name></BlobPrefix>" for entry in folders]
        for key in keys:
            entry = self.server.objects[key]
            parts.append(
                f"<Blob><Name>{key}</Name><Properties>"
                f"<Last-Modified>{formatdate(entry.changed, usegmt=True)}</Last-Modified>"
                f"<Etag>{entry.e_tag[1:-1]}</Etag><Content-Length>{len(entry.data)}</Content-Length>"
                "<Content-Type>application/octet-stream</Content-Type>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            )
        blobs = f"<Blobs>{''.join(parts)}</Blobs><NextMarker>{following}</NextMarker>"
        return 200, {}, xml("EnumerationResults", blobs)

    def delete_batch(self):
        """Delete the blobs of a multipart request; each one has its own answer."""
        parts = []
        pattern = r"Content-ID: (\d+)\r\n.*?DELETE (\S+) HTTP/1.1\r\n(.*?)\r\n\r\n"
        for number, path, _ in re.findall(pattern, self.body.decode(), re.DOTALL):
            key = unquote(urlsplit(path).path)[1:].partition("/")[2]
            status = "202 Accepted" if key in self.server.objects else "404 BlobNotFound"
            if self.server.refuses_deletions:
                status = "403 AuthorizationPermissionMismatch"
            else:
                self.server.objects.pop(key, None)
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            answer = f"HTTP/1.1 {status}\r\nx-ms-version: 2023-11-03"
            parts.append(f"--answers\r\n{head}\r\n\r\n{answer}\r\n\r\n\r\n")
        body = "".join(parts) + "--answers--\r\n"
        return 202, {"Content-Type": "multipart/mixed; boundary=answers"}, body.encode()


class AzureServer(ObjectServer):
    handler = AzureHandler
    scheme, refused = "az", ("account_key", WRONG_KEY)
    unreadable = ("account_key", "hidden!")

    def access(self):
        return {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": KEY}
