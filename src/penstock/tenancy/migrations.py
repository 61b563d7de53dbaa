"""The schema, as numbered steps that only go forward. Both databases run the same statements.

Every process runs them when it opens the store; the database's lock lets one at a time through, and the others find
nothing left to do. A step that was released is never edited: what is wrong with it is mended by the next.
"""

from __future__ import annotations

from penstock.core.errors import ConfigError
from penstock.tenancy.database import Database

TENANTS_AND_KEYS = (
    # Every change to tenants or keys takes the next number under this row's lock, so numbers are committed in order:
    # who has seen revision n has seen everything up to it.
    "CREATE TABLE store_revision (id INTEGER PRIMARY KEY, value BIGINT NOT NULL)",
    "INSERT INTO store_revision (id, value) VALUES (1, 0)",
    "CREATE TABLE tenants (id TEXT PRIMARY KEY, document TEXT NOT NULL)",
    """CREATE TABLE api_keys (
        id TEXT PRIMARY KEY,
        tenant_id TEXT NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
        hash TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION,
        revoked_at DOUBLE PRECISION
    )""",
    "CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id)",
    # When a tenant or its keys last changed; a removed tenant's row stays, so that followers hear of it.
    "CREATE TABLE tenant_changes (tenant_id TEXT PRIMARY KEY, revision BIGINT NOT NULL)",
    "CREATE INDEX tenant_changes_by_revision ON tenant_changes (revision)",
)

USAGE = (
    # Usage outlives its tenant: nothing here refers to the tables above.
    """CREATE TABLE usage_by_hour (
        tenant_id TEXT NOT NULL,
        hour BIGINT NOT NULL,
        model TEXT NOT NULL,
        key_id TEXT NOT NULL,
        requests BIGINT NOT NULL,
        input_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL,
        cost_nanos BIGINT NOT NULL,
        PRIMARY KEY (tenant_id, hour, model, key_id)
    )""",
    # What budgets are checked against: `2026-11-15` and `2026-11` are periods.
    """CREATE TABLE spending (
        period TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        tokens BIGINT NOT NULL,
        cost_nanos BIGINT NOT NULL,
        PRIMARY KEY (period, tenant_id)
    )""",
    # Requests already counted, for as long as somebody may report them again.
    "CREATE TABLE settled_requests (request_id TEXT PRIMARY KEY, settled_at BIGINT NOT NULL)",
    "CREATE INDEX settled_requests_by_time ON settled_requests (settled_at)",
)

ADMINS = (
    # A row is never deleted: its revision tells followers that it changed.
    """CREATE TABLE admin_keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        hash TEXT NOT NULL UNIQUE,
        created_at DOUBLE PRECISION NOT NULL,
        revoked_at DOUBLE PRECISION,
        revision BIGINT NOT NULL
    )""",
)

ROUTES = (
    # What the gateways' files say of models with versions, and every change to that: the last one is in force.
    "CREATE TABLE routes (name TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE route_revisions (revision BIGINT PRIMARY KEY, name TEXT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX route_revisions_by_name ON route_revisions (name, revision)",
)

MEASURED = (
    # What replicas measured of a request, beside its tokens; of usage from before, and of other servers, nothing.
    "ALTER TABLE usage_by_hour ADD COLUMN device_us BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE usage_by_hour ADD COLUMN kv_block_ms BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE spending ADD COLUMN device_us BIGINT NOT NULL DEFAULT 0",
)

ADAPTERS = (
    # What gateways loaded on replicas because their files named it; what was loaded by hand is not here.
    "CREATE TABLE brought_adapters (replica TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (replica, name))",
)

REPLICAS = (
    # Replicas that were added at run time. A removed one leaves no row: the one row of the second table says that
    # something has changed.
    "CREATE TABLE replicas (model TEXT NOT NULL, url TEXT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (model, url))",
    "CREATE TABLE replica_changes (revision BIGINT NOT NULL)",
    "INSERT INTO replica_changes (revision) VALUES (0)",
)

FLEET = (
    # One row per fleet: the controller that acts. Everybody else's writes are refused by its epoch.
    """CREATE TABLE fleet_lease (
        name TEXT PRIMARY KEY, holder TEXT NOT NULL, epoch BIGINT NOT NULL, beat BIGINT NOT NULL
    )""",
    """CREATE TABLE fleet_demand (
        gateway TEXT NOT NULL,
        pool TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (gateway, pool)
    )""",
    "CREATE TABLE fleet_replicas (id TEXT PRIMARY KEY, pool TEXT NOT NULL, document TEXT NOT NULL)",
    "CREATE TABLE fleet_pools (pool TEXT PRIMARY KEY, document TEXT NOT NULL)",
    """CREATE TABLE fleet_memory (
        pool TEXT NOT NULL, name TEXT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (pool, name)
    )""",
    "CREATE TABLE fleet_decisions (at DOUBLE PRECISION NOT NULL, pool TEXT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX fleet_decisions_by_pool ON fleet_decisions (pool, at)",
    "CREATE TABLE fleet_history (at DOUBLE PRECISION NOT NULL, pool TEXT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX fleet_history_by_pool ON fleet_history (pool, at)",
)

FLEET_ROUNDS = (
    # Rounds of the autoscaling policy, each with all that it decided by: for `penstock replay fleet`.
    "CREATE TABLE fleet_rounds (at DOUBLE PRECISION NOT NULL, pool TEXT NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX fleet_rounds_by_pool ON fleet_rounds (pool, at)",
)

RESPONSES = (
    # Responses outlive a change to their tenant, and go with it: an anonymous caller's belong to no row of `tenants`.
    """CREATE TABLE responses (
        tenant_id TEXT NOT NULL,
        id TEXT NOT NULL,
        previous_id TEXT,
        status TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION NOT NULL,
        num_bytes BIGINT NOT NULL,
        input TEXT NOT NULL,
        response TEXT NOT NULL,
        is_background INTEGER NOT NULL,
        owner TEXT,
        owner_until DOUBLE PRECISION,
        PRIMARY KEY (tenant_id, id)
    )""",
    "CREATE INDEX responses_by_age ON responses (tenant_id, created_at, num_bytes)",
    "CREATE INDEX responses_by_expiry ON responses (expires_at)",
    "CREATE INDEX responses_by_owner ON responses (owner)",
)

RESPONSE_EVENTS = (
    "ALTER TABLE responses ADD COLUMN is_streamed INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE responses ADD COLUMN events TEXT",
)

BATCHES = (
    # A file is a list of objects in the store of files; what its bytes say is nobody's business here.
    """CREATE TABLE files (
        tenant_id TEXT NOT NULL,
        id TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        status TEXT NOT NULL,
        num_bytes BIGINT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        touched_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION NOT NULL,
        chunks TEXT NOT NULL,
        PRIMARY KEY (tenant_id, id)
    )""",
    "CREATE INDEX files_by_age ON files (tenant_id, created_at, num_bytes)",
    "CREATE INDEX files_by_expiry ON files (expires_at)",
    # Every claim takes the next epoch: what an earlier owner writes afterwards is refused by it.
    """CREATE TABLE batches (
        tenant_id TEXT NOT NULL,
        id TEXT NOT NULL,
        kind TEXT NOT NULL,
        status TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        due_at DOUBLE PRECISION NOT NULL,
        kept_until DOUBLE PRECISION NOT NULL,
        input_file_id TEXT NOT NULL,
        num_rows BIGINT NOT NULL,
        completed BIGINT NOT NULL,
        failed BIGINT NOT NULL,
        cancelled BIGINT NOT NULL,
        expired BIGINT NOT NULL,
        owner TEXT,
        owner_until DOUBLE PRECISION,
        epoch BIGINT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (tenant_id, id)
    )""",
    "CREATE INDEX batches_by_age ON batches (tenant_id, created_at)",
    "CREATE INDEX batches_by_status ON batches (status, created_at)",
    # Rows of batches that go on: that one is here means that it is answered and charged. Its result is here until it
    # is in a file.
    """CREATE TABLE batch_rows (
        batch_id TEXT NOT NULL,
        line BIGINT NOT NULL,
        file TEXT NOT NULL,
        num_bytes BIGINT NOT NULL,
        result TEXT,
        PRIMARY KEY (batch_id, line)
    )""",
)

BACKGROUND = (
    # What another process needs to make a response whose own was killed; gone when the response has ended.
    "ALTER TABLE responses ADD COLUMN request TEXT",
    "ALTER TABLE responses ADD COLUMN key_id TEXT",
    "ALTER TABLE responses ADD COLUMN tries INTEGER NOT NULL DEFAULT 0",
)

MODEL_ORDERS = (
    # Operators' words about models that share a device; see `tenancy.fleet.ModelOrder`.
    "CREATE TABLE model_orders (model TEXT PRIMARY KEY, document TEXT NOT NULL)",
)

ROLLOUTS = (
    # `revision` grows with each change, `changed` is the store's revision of the last that gateways must know, and
    # `num_blocks` numbers blocks in the order of their commits.
    """CREATE TABLE rollouts (
        id TEXT PRIMARY KEY,
        model TEXT NOT NULL,
        started_at DOUBLE PRECISION NOT NULL,
        is_over INTEGER NOT NULL,
        revision BIGINT NOT NULL,
        changed BIGINT NOT NULL,
        num_blocks BIGINT NOT NULL,
        document TEXT NOT NULL
    )""",
    "CREATE UNIQUE INDEX rollouts_that_are_on ON rollouts (model) WHERE is_over = 0",
    "CREATE INDEX rollouts_by_change ON rollouts (changed)",
    """CREATE TABLE rollout_story (
        rollout TEXT NOT NULL, number BIGINT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (rollout, number)
    )""",
    # What gateways measured; gone when the rollout is over.
    """CREATE TABLE rollout_blocks (
        rollout TEXT NOT NULL,
        step BIGINT NOT NULL,
        gateway TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL,
        number BIGINT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (rollout, step, gateway, at)
    )""",
    "CREATE INDEX rollout_blocks_by_number ON rollout_blocks (rollout, number)",
    # What users think of answers, numbered in the order of commits under the lock of the counter's row.
    "CREATE TABLE feedback_counter (value BIGINT NOT NULL)",
    "INSERT INTO feedback_counter (value) VALUES (0)",
    """CREATE TABLE feedback (
        tenant_id TEXT NOT NULL,
        request_id TEXT NOT NULL,
        number BIGINT NOT NULL,
        at DOUBLE PRECISION NOT NULL,
        score DOUBLE PRECISION NOT NULL,
        comment TEXT NOT NULL,
        PRIMARY KEY (tenant_id, request_id)
    )""",
    "CREATE INDEX feedback_by_number ON feedback (number)",
    "CREATE INDEX feedback_by_time ON feedback (at)",
)

MIGRATIONS = (
    TENANTS_AND_KEYS,
    USAGE,
    ADMINS,
    ROUTES,
    MEASURED,
    ADAPTERS,
    REPLICAS,
    FLEET,
    FLEET_ROUNDS,
    RESPONSES,
    RESPONSE_EVENTS,
    BATCHES,
    BACKGROUND,
    MODEL_ORDERS,
    ROLLOUTS,
)


def migrate(database: Database) -> int:
    """Bring the schema up to date; how many steps were taken."""
    with database.migrating() as execute:
        execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY)")
        done = int(execute("SELECT COALESCE(MAX(version), 0) FROM migrations")[0][0])
        if done > len(MIGRATIONS):
            raise ConfigError(
                f"the store has schema {done}, made by a newer penstock; this one knows {len(MIGRATIONS)}"
            )
        for version, statements in enumerate(MIGRATIONS[done:], start=done + 1):
            for statement in statements:
                execute(statement)
            execute("INSERT INTO migrations (version) VALUES (?)", (version,))
    return len(MIGRATIONS) - done
