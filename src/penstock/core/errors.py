"""Every error a user can meet, as one tree with stable codes.

    PenstockError
    ├── InvalidRequest            the client's fault; nothing was changed
    │   ├── ContextLengthExceeded     prompt (plus output limit) does not fit the model
    │   ├── InvalidImage              an image of it cannot be had or taken; `reason` says why
    │   ├── InvalidValue              well-formed, but a value is not one that can be kept
    │   ├── PreviousResponseNotFound  the conversation that a response is to go on with is not kept, or has not ended
    │   ├── RequestQuarantined        replicas were lost while they worked on this very request
    │   ├── StorageQuotaExceeded      the tenant keeps as many bytes, files or rows of batches as it may
    │   ├── TooLargeForLimit          more tokens than the tenant's whole limit per minute
    │   ├── UnsupportedParameter      understood, but not built or not possible here
    │   ├── ThreadUnsupported         Anthropic's clients are to send the whole conversation
    │   ├── UnsupportedTask           the model can do other things, which are named
    │   ├── BodyTooLarge
    │   ├── HeadersTooLarge
    │   ├── UpgradeRequired           a WebSocket of another version
    │   └── RequestTimeout            the request itself did not arrive in time
    ├── Unauthenticated           no key, or one that is unknown, revoked or expired
    ├── PermissionDenied          the key is known, but not for this
    ├── Conflict                  it is there already, or no longer in a state that allows this
    ├── NotFound                  no such path
    │   ├── ModelNotFound
    │   ├── TenantNotFound
    │   ├── KeyNotFound
    │   ├── ReplicaNotFound
    │   ├── ResponseNotFound
    │   ├── FileNotFound
    │   ├── BatchNotFound
    │   └── RolloutNotFound
    ├── MethodNotAllowed
    ├── Overloaded                try again later; carries retry_after_s
    ├── RateLimited               one of the tenant's limits, named by `reason`; carries retry_after_s
    ├── BudgetExhausted           the tenant's tokens or money for the day or month are spent; carries retry_after_s
    ├── BuffersFull               no room for the request's body now; carries retry_after_s
    ├── StoreUnavailable          the store of tenants and usage does not answer
    ├── StoreCorrupt              it answers, but what it holds of somebody cannot be read
    ├── LeaseLost                 another controller of the fleet acts now
    ├── PoolTaken                 another fleet of the store has a pool of this name
    ├── CapacityRefused           a driver has no capacity of this kind now
    ├── OrchestratorError         Kubernetes or Ray refuses, and `reason` is its own word for it, or does not answer
    ├── EngineUnavailable         the engine is starting, restarting or draining; carries retry_after_s
    ├── EngineFailed              the engine died or a step failed while this request was running
    ├── RequestAborted            the client went away, or the server is shutting down
    ├── StepFailed                a step of a pipeline failed; names the step, and `reason` says how
    │   └── StepTimeout               it took longer than its `timeout_s`
    ├── ModelError                a model cannot be used, and what to do about it
    │   ├── ModelMissing
    │   ├── ModelCorrupt
    │   └── ModelUnsupported
    └── ConfigError               a setting is wrong; names the nearest known key

`code` is part of the public contract; the HTTP status of each lives in `api/errors.py`.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason  # for programs: which limit, which shortage
        self.retry_after_s = retry_after_s


class InvalidRequest(PenstockError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class InvalidValue(InvalidRequest):
    code = "invalid_value"


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class RequestQuarantined(InvalidRequest):
    code = "request_quarantined"


class StorageQuotaExceeded(InvalidRequest):
    code = "storage_quota_exceeded"


class TooLargeForLimit(InvalidRequest):
    code = "too_large_for_limit"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ThreadUnsupported(InvalidRequest):
    """Anthropic's code: its clients send such a request again, with the whole conversation."""

    code = "thread_unsupported_request"


class UnsupportedTask(InvalidRequest):
    code = "unsupported_task"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"


class HeadersTooLarge(InvalidRequest):
    code = "headers_too_large"


class UpgradeRequired(InvalidRequest):
    code = "upgrade_required"


class RequestTimeout(InvalidRequest):
    code = "request_timeout"


class Unauthenticated(PenstockError):
    code = "unauthenticated"


class PermissionDenied(PenstockError):
    code = "permission_denied"


class Conflict(PenstockError):
    code = "conflict"


class NotFound(PenstockError):
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class TenantNotFound(NotFound):
    code = "tenant_not_found"


class KeyNotFound(NotFound):
    code = "key_not_found"


class ReplicaNotFound(NotFound):
    code = "replica_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class FileNotFound(NotFound):
    code = "file_not_found"


class BatchNotFound(NotFound):
    code = "batch_not_found"


class RolloutNotFound(NotFound):
    code = "rollout_not_found"


class MethodNotAllowed(PenstockError):
    code = "method_not_allowed"


class Overloaded(PenstockError):
    code = "overloaded"


class RateLimited(PenstockError):
    code = "rate_limited"


class BudgetExhausted(PenstockError):
    code = "budget_exhausted"


class BuffersFull(PenstockError):
    code = "buffers_full"


class StoreUnavailable(PenstockError):
    code = "store_unavailable"


class StoreCorrupt(PenstockError):
    code = "store_corrupt"


class LeaseLost(PenstockError):
    """Another controller acts now."""

    code = "lease_lost"


class PoolTaken(PenstockError):
    """Another fleet of the store has a pool of this name."""

    code = "pool_taken"


class CapacityRefused(PenstockError):
    """A driver has no capacity of this kind now."""

    code = "capacity_refused"


class OrchestratorError(PenstockError):
    """Kubernetes or Ray refuses, and `reason` is its own word for it, or does not answer (`Unreachable`)."""

    code = "orchestrator_error"


class EngineUnavailable(PenstockError):
    code = "engine_unavailable"


class EngineFailed(PenstockError):
    code = "engine_failed"


class RequestAborted(PenstockError):
    code = "request_aborted"


class StepFailed(PenstockError):
    """A step of a pipeline failed."""

    code = "step_failed"


class StepTimeout(StepFailed):
    code = "step_timeout"


class ModelError(PenstockError):
    code = "model_error"


class ModelMissing(ModelError):
    code = "model_missing"


class ModelCorrupt(ModelError):
    code = "model_corrupt"


class ModelUnsupported(ModelError):
    code = "model_unsupported"


class ConfigError(PenstockError):
    code = "config_error"


def all_errors() -> list[type[PenstockError]]:
    """The tree, depth first; the generated reference and the status table are checked against it."""

    def walk(cls: type[PenstockError]) -> list[type[PenstockError]]:
        return [cls, *(found for child in cls.__subclasses__() for found in walk(child))]

    return walk(PenstockError)
