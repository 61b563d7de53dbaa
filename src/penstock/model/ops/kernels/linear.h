/* A linear layer, and what its rows may be made of.
 *
 * Shapes: W [n, k] in any arithmetic, rows [m, k]. linear.c has the limit. */
#pragma once

#include "pool.h"
#include "product.h"

struct linear {
    const struct arithmetic *arithmetic;
    const char *panels; /* [n / 16] panels */
    const float *bias; /* [n], or NULL */
    const int32_t *order; /* [k]: column i of the panels meets value order[i] of a row; NULL: i */
    int n, k;
    float unit; /* of the scales in low-bit panels */
};

/* The rows that are multiplied: x as it is, its norm, or SwiGLU of its halves. A row goes into the form that kernels
 * read while it is made, in the thread that made it. */
struct source {
    const float *x; /* [m, k], or [m, 2 k] if gated */
    float *residual; /* [m, k]: x is added to it, and the sum is normed; or NULL */
    const float *norm; /* [k]: RMSNorm's weight; or NULL */
    float eps;
    int gated; /* gate first */
    float alpha, limit; /* of gpt-oss's gate; a limit of 0: it is SiLU */
};

/* Memory that somebody reads next, to be fetched by products that are too busy computing to need all of its bandwidth. */
struct kv_prefetch;

void linear_run(struct pool *pool, const struct linear *l, const struct source *from, float *y, int m);
void linear_run_with(struct pool *pool, const struct linear *l, const struct source *from, float *y, int m,
                     struct kv_prefetch *prefetch);
