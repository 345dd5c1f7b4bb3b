"""A store that speaks S3's protocol, moto's, in a process of its own."""

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roseinfer.bench.load.launcher import free_port
from tests.conftest import go_without


@dataclass(frozen=True)
class Store:
    address: str

    @property
    def environment(self) -> dict[str, str]:
        """What makes a client find it."""
        keys = {"AWS_ACCESS_KEY_ID": "of-a-test", "AWS_SECRET_ACCESS_KEY": "of-a-test"}
        return {**keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.address}

    def client(self) -> Any:
        from boto3.session import Session

        keys = {"aws_access_key_id": "of-a-test", "aws_secret_access_key": "of-a-test"}
        return Session(**keys, region_name="us-east-1").client("s3", endpoint_url=self.address)

    def fill(self, bucket: str, files: Mapping[str, bytes]) -> None:
        """Make these the only objects of the bucket."""
        s3 = self.client()
        if bucket in {found["Name"] for found in s3.list_buckets()["Buckets"]}:
            for item in s3.list_objects_v2(Bucket=bucket).get("Contents", ()):
                s3.delete_object(Bucket=bucket, Key=item["Key"])
        else:
            s3.create_bucket(Bucket=bucket)
        for name, content in files.items():
            s3.put_object(Bucket=bucket, Key=name, Body=content)


@contextmanager
def running_store() -> Iterator[Store]:
    if importlib.util.find_spec("moto") is None:
        go_without("moto is not installed; `make setup` installs it")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield Store(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()
