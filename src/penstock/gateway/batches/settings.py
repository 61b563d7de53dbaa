"""Settings of files and batches: the group `batches` of a gateway's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.core.settings import setting
from penstock.tenancy.batches import BatchLimits
from penstock.tenancy.files import FileLimits


@dataclass(frozen=True)
class BatchSettings:
    files: str | None = setting(
        None,
        "where files are: a directory (of several hosts, one that all mount), or "
        "s3://BUCKET/PREFIX?endpoint=URL&region=R; none: files and batches are refused",
    )
    keep_s: Annotated[float, Meta(ge=60, le=366 * 86400)] = setting(
        30 * 86400.0, "how long files, and results from the end of their batch on, are kept"
    )
    max_file_bytes: Annotated[int, Meta(ge=1 << 20, le=4 << 30)] = setting(200 << 20, "the largest file that is taken")
    max_rows: Annotated[int, Meta(ge=1, le=1_000_000)] = setting(50_000, "rows of one batch")
    max_bytes_per_tenant: Annotated[int, Meta(ge=1 << 20)] = setting(
        10 << 30, "of a tenant's files, results included; beyond that it uploads no more"
    )
    max_files_per_tenant: Annotated[int, Meta(ge=1)] = setting(10_000, "files of a tenant, results included")
    max_rows_per_tenant: Annotated[int, Meta(ge=1)] = setting(
        500_000, "rows of a tenant's batches that have not ended; beyond that it creates no more"
    )
    max_running: Annotated[int, Meta(ge=1, le=1000)] = setting(
        16, "batches that a process runs at a time, one tenant's at most half of them"
    )
    max_in_flight: Annotated[int, Meta(ge=1, le=10_000)] = setting(
        64, "rows that a process has at a model's replicas at a time; there are fewer while others need the room"
    )
    lease_s: Annotated[float, Meta(ge=2, le=600)] = setting(
        30.0, "how long after a gateway was killed another goes on with its batches"
    )
    busy: Annotated[float, Meta(gt=0, le=1)] = setting(
        0.5, "share of a replica's places, KV blocks and of slo.ttft_s in expected wait up to which rows are sent there"
    )

    @property
    def file_limits(self) -> FileLimits:
        return FileLimits(self.max_bytes_per_tenant, self.max_files_per_tenant)

    @property
    def batch_limits(self) -> BatchLimits:
        return BatchLimits(self.max_rows_per_tenant)
