"""A local server with the XML interface of Google Cloud Storage, as its reference describes it.

https://cloud.google.com/storage/docs/xml-api/reference-methods
"""

import hashlib
import re
from datetime import UTC, datetime

from object_server_base import ObjectHandler, ObjectServer, RefusalError, xml

TOKEN = "token-of-tests"
DENIED_TOKEN = "token-of-tests-without-permission"
LEAST_PART = 5 << 20


class GcsHandler(ObjectHandler):
    no_bucket, no_object = "NoSuchBucket", "NoSuchKey"

    def check_credentials(self):
        token = self.headers.get("Authorization", "")
        if token == f"Bearer {DENIED_TOKEN}":
            raise RefusalError(403, "AccessDenied")
        if token != f"Bearer {TOKEN}":
            raise RefusalError(401, "AuthenticationRequired")

    @staticmethod
    def e_tag_of(data, number):
        return f'"{hashlib.md5(data).hexdigest()}"'  # equal bytes have equal ETags

    def headers_of(self, stored):
        return {**super().headers_of(stored), "x-goog-generation": stored.number}

    def answer_request(self):
        method, query = self.command, self.query
        if "uploads" in query or "uploadId" in query:
            return self.upload()
        if method in ("GET", "HEAD"):
            return self.read() if self.key else self.list()
        if method == "DELETE":
            if self.server.refuses_deletions:
                raise RefusalError(403, "AccessDenied")
            self.found()  # a missing object is an error: 404
            del self.server.objects[self.key]
            return 204, {}, b""
        self.check_conditions()
        return 200, self.headers_of(self.write(self.body)), b""

    def check_conditions(self):
        """Refuse a write if the live generation is not the required one; 0: no live object."""
        generation = self.headers.get("x-goog-if-generation-match")
        live = self.server.objects.get(self.key)
        if generation is not None and int(generation) != (live.number if live else 0):
            raise RefusalError(412, "PreconditionFailed")

    def list(self):
        assert self.query["list-type"] == "2"
        keys, folders, following = self.page("continuation-token")
        parts = [f"<IsTruncated>{'true' if following else 'false'}</IsTruncated>"]
        if following:
            parts.append(f"<NextContinuationToken>{following}</NextContinuationToken>")
        for key in keys:
            entry = self.server.objects[key]
            changed = datetime.fromtimestamp(entry.changed, UTC).isoformat("T", "milliseconds")
            parts.append(
                f"<Contents><Key>{key}</Key><Generation>{entry.number}</Generation>"
                f"<LastModified>{changed}</LastModified><ETag>{entry.e_tag}</ETag>"
                f"<Size>{len(entry.data)}</Size></Contents>"
            )
        parts += [f"<CommonPrefixes><Prefix>{entry}</Prefix></CommonPrefixes>" for entry in folders]
        return 200, {}, xml("ListBucketResult", "".join(parts))

    def upload(self):
        """Begin, continue, complete or abort a multipart upload."""
        uploads, name = self.server.uploads, self.query.get("uploadId")
        if name is None:
            name = f"upload-{next(self.server.numbers)}"
            uploads[name] = {}
            return 200, {}, xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        if name not in uploads:
            raise RefusalError(404, "NoSuchUpload")
        if self.command == "PUT":
            uploads[name][int(self.query["partNumber"])] = self.body
            return 200, {"ETag": self.e_tag_of(self.body, 0)}, b""
        if self.command == "DELETE":
            del uploads[name]
            return 204, {}, b""
        parts = []
        pattern = r"<ETag>(.*?)</ETag>\s*<PartNumber>(\d+)</PartNumber>"
        for e_tag, number in re.findall(pattern, self.body.decode()):
            part = uploads[name].get(int(number))
            if part is None or self.e_tag_of(part, 0) != e_tag:
                raise RefusalError(400, "InvalidPart")
            parts.append(part)
        if any(len(part) < LEAST_PART for part in parts[:-1]):
            raise RefusalError(400, "EntityTooSmall")
        del uploads[name]
        stored = self.write(b"".join(parts))
        headers = {"x-goog-generation": stored.number}
        return 200, headers, xml("CompleteMultipartUploadResult", f"<ETag>{stored.e_tag}</ETag>")


class GcsServer(ObjectServer):
    handler = GcsHandler
    scheme, refused = "gs", ("bearer_token", DENIED_TOKEN)
    unreadable = ("service_account_key", "hidden")

    def access(self):
        return {"base_url": self.endpoint, "bearer_token": TOKEN}
