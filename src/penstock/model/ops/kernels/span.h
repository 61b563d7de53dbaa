/* A tile of rows over one span of their context.
 *
 * Shapes: 1 to MOST_ROWS rows by SPAN positions. span.c has the limit. */
#pragma once

#include "attention.h"

#define SPAN 256 /* positions */
#define SPAN_TILES (SPAN / PANEL)
#define SCORE_STRIDE (SPAN + PANEL) /* not a power of two: rows must not share cache sets */

struct range {
    int from, to;
};

struct rows { /* a row is one query of one head; all of them are of one KV head, and find a span in the same blocks */
    const char *q; /* q_stride apart */
    int count, kv_head;
    int sequence; /* whose blocks */
    struct range seen[MOST_ROWS]; /* positions */
};

struct partial { /* softmax of one row over one span, or over all spans so far */
    float max, sum;
};

struct result { /* of a tile of rows, wherever it lies */
    struct partial *rows; /* [count] */
    float *sums; /* [count][value_panels * 16] */
};

struct work { /* a thread's own; what it points to lies behind it */
    float scores[MOST_ROWS * SCORE_STRIDE];
    float weights[MOST_ROWS * SCORE_STRIDE]; /* of the values, in the arithmetic's form */
    const char *keys[SPAN_TILES];
    const char *values[SPAN_TILES];
    const char *panels[SPAN_TILES * MOST_PANELS];
    const char *next[SPAN_TILES]; /* keys that this thread reads next */
    const char *ahead[SPAN_TILES * MOST_PANELS];
    float key_scales[SPAN], value_scales[SPAN]; /* where the cache has any */
    struct result results[2]; /* of MOST_ROWS */
    char *rows; /* for MOST_ROWS queries that do not lie together */
    char *spare; /* for tiles that must be put together */
};

size_t work_bytes(const struct call *c);
struct work *work_of(const struct call *c, int thread);

/* So many rows' results, wherever they are kept. */
size_t result_bytes(const struct call *c, int rows);
struct result result_at(char *at, int rows);

/* `next_tiles` of w->next are fetched meanwhile. */
void attend_span(const struct call *c, const struct rows *rows, int span, struct work *w, int next_tiles,
                 struct result result);

/* Put where the keys of a span lie into w->next, and return how many tiles there are. */
int span_fetch(const struct call *c, const struct rows *rows, int span, struct work *w);
