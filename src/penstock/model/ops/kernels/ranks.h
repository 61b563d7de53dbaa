/* Collectives between the ranks of one model that share a host: sums and gathers through shared memory.
 *
 * Shapes: any number of floats. ranks.c has the limit. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

/* One rank's view of the group. Mirrored in library.py. */
struct ranks {
    unsigned char *base; /* of the shared memory: `ranks_bytes` of it, zeroed before the first round */
    size_t slot_bytes; /* of each of a rank's two slots */
    int64_t timeout_ns; /* how long a rank waits for another */
    int32_t rank, size;
    uint32_t round; /* collectives so far; all ranks make the same ones in the same order */
    int32_t lost; /* 0: all is well; else 1 + the rank that did not come */
    int64_t spent_ns; /* in collectives so far, waits included */
};

size_t ranks_bytes(int size, size_t slot_bytes);

/* Where this rank's part of the next sum may be written in place; NULL: it does not fit. */
float *ranks_slot(const struct ranks *ranks, size_t n);

/* out = the sum of all ranks' `part`, added in the order of ranks: every rank has the same bits. `part` may be the
 * rank's slot, or `out`. Returns 0, or 1 + the rank that was lost: `out` is worth nothing then. */
int ranks_sum(struct pool *pool, struct ranks *ranks, const float *part, float *out, size_t n);

/* out [m, count * n] = `part` [m, n], `stride` apart, of a group of `count` neighbours side by side. All ranks call it. */
int ranks_gather(struct ranks *ranks, const float *part, float *out, size_t m, size_t n, size_t stride, int count);

/* Among groups of `count` neighbours: `parts` [count, m, n] has one for each of them, and out [count, m, n] = what each
 * of them has for this rank. All ranks call it. */
int ranks_exchange(struct ranks *ranks, const float *parts, float *out, size_t m, size_t n, int count);

/* Tell all ranks that one of them is gone. Whoever waits gives up. */
void ranks_give_up(struct ranks *ranks, int gone);
