"""Files and batches as the two APIs show them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.api.batches import encode
from penstock.tenancy.batches import StoredBatch
from penstock.tenancy.files import StoredFile

_STATES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_view(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_view(batch: StoredBatch) -> dict[str, Any]:
    """OpenAI's. Files with results are named when they can be read."""
    facts, times = batch.facts, batch.facts.times
    errors = [{"code": one.code, "message": one.message, "line": one.line, "param": one.param} for one in facts.errors]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": facts.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": facts.completion_window,
        "status": batch.status,
        "output_file_id": _named(batch, facts.output_file_id),
        "error_file_id": _named(batch, facts.error_file_id),
        "created_at": int(batch.created_at),
        "expires_at": int(batch.due_at),
        **{f"{state}_at": int(times[state]) if state in times else None for state in _STATES},
        "request_counts": {"total": batch.num_rows, "completed": batch.completed, "failed": batch.failed},
        "metadata": facts.metadata,
    }


def message_batch_view(batch: StoredBatch) -> dict[str, Any]:
    """Anthropic's. Counts other than `processing` are told at the end, as there."""
    times, is_over = batch.facts.times, not batch.is_active
    ended_at = next((times[one] for one in ("completed", "failed", "expired", "cancelled") if one in times), None)
    has_results = is_over and bool(batch.facts.output_file_id)
    counts = (batch.completed, batch.failed, batch.cancelled, batch.expired) if is_over else (0, 0, 0, 0)
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if is_over else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": {
            "processing": 0 if is_over else batch.num_rows,
            **dict(zip(("succeeded", "errored", "canceled", "expired"), counts, strict=True)),
        },
        "created_at": _rfc3339(batch.created_at),
        "expires_at": _rfc3339(batch.due_at),
        "ended_at": _rfc3339(ended_at) if is_over else None,
        "cancel_initiated_at": _rfc3339(times.get("cancelling")),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{batch.id}/results" if has_results else None,
    }


def list_view(data: Sequence[dict[str, Any]], limit: int) -> bytes:
    """A page, of one more than were asked for, if there are so many."""
    page = data[:limit]
    shown: dict[str, Any] = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(data) > limit,
    }
    return encode(shown)


def _named(batch: StoredBatch, file_id: str) -> str | None:
    return file_id if file_id and not batch.is_active else None


def _rfc3339(at_s: float | None) -> str | None:
    if at_s is None:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
