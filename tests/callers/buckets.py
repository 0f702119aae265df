"""An S3 of this machine's, for programs that read nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_KEYS = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")


@contextmanager
def bucket(name: str) -> Iterator[str]:
    """Its address; variables of this process and of those that it starts lead to it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for prefix in ("AWS_", "FLYTE_AWS_"):
            for key in _KEYS:
                patch.setenv(prefix + key, "test")
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("FLYTE_AWS_ENDPOINT", url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_REGION", "us-east-1")
        _client().create_bucket(Bucket=name)
        yield f"s3://{name}"
    server.stop()


def upload(folder: Path, name: str, prefix: str) -> None:
    """The files of a folder, to a bucket."""
    for file in folder.iterdir():
        _client().upload_file(str(file), name, f"{prefix}/{file.name}")


def _client():  # type: ignore[no-untyped-def]  # boto3 makes its classes as it runs
    import boto3

    return boto3.client("s3")
