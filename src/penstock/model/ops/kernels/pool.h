/* The threads. One caller at a time; it takes part in the work itself.
 *
 * Shapes: any number of chunks. pool.c has the limit. */
#pragma once

#include <stddef.h>

struct pool;

typedef void (*task)(void *argument, int chunk, int thread);

struct pool *pool_new(int threads);
void pool_free(struct pool *pool);
int pool_threads(const struct pool *pool);

/* Run `task` for every chunk, on whichever thread is free, and return when all are done. */
void pool_run(struct pool *pool, int chunks, task run, void *argument);

/* Memory that lasts until the next call for the same purpose; aligned to a cache line, not cleared. */
enum purpose {
    SCRATCH_ROWS,
    SCRATCH_WORK,
    SCRATCH_ITEMS,
    SCRATCH_PARTIALS,
    SCRATCH_BETWEEN,
    SCRATCH_SHARING,
    SCRATCH_KV_PREFETCH,
    SCRATCH_SHARED_ITEMS,
    SCRATCH_SHARED_PARTIALS,
    SCRATCH_GROUP,
    PURPOSES
};
void *pool_scratch(struct pool *pool, enum purpose purpose, size_t bytes);
