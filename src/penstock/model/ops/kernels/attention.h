/* What one call of attention knows, and what cache.c does for it.
 *
 * Shapes: head sizes of multiples of 8 up to MOST_DIM, blocks of any size, any mix of chunks and single tokens.
 * attention.c has the limit. */
#pragma once

#include "pool.h"
#include "product.h"

#define MOST_DIM 576

/* This struct and the next are mirrored in native.py. */
struct layer {
    char *keys; /* [blocks][kv_heads][block_size / columns] panels: columns are positions, k are dimensions */
    char *values; /* [blocks][kv_heads][dim / 16] panels: columns are dimensions, k are positions; NULL: see value_dim */
    const float *cos, *sin; /* [context, dim / 2]; or NULL: heads come rotated */
    const float *q_norm, *k_norm; /* [dim], or NULL */
    const float *sinks; /* [heads of all ranks that share out a sequence]: scores beside the keys', without a value; or NULL */
    int32_t arithmetic, block_size, heads, kv_heads, dim;
    int32_t window; /* 0: all; < 0: chunks of so many tokens, and a token sees its own */
    float scale, norm_eps;
    float cap; /* of scores; 0: none */
    int32_t settled; /* the cache lies in huge pages: fetching ahead is cheap */
    int32_t place, ranks; /* of every `ranks` blocks of a sequence the one at `place` is kept here; 0, 1: all are */
    int32_t value_dim; /* values are the first so many dimensions of keys; 0: they are cached beside them */
};

struct batch {
    const int32_t *positions; /* [tokens] */
    const int32_t *query_starts; /* [sequences + 1] */
    const int32_t *context_lens; /* [sequences] */
    const int32_t *block_tables; /* [sequences, table_stride] */
    int32_t table_stride, sequences, tokens;
};

struct ranks;
struct sharing;

struct call {
    const struct layer *layer;
    const struct batch *batch;
    int heads; /* of queries: those of all ranks that share out a sequence */
    const float *queries; /* [tokens, heads * dim], query_stride apart */
    size_t query_stride;
    const float *kv; /* [tokens, 2 * kv_heads * dim], or without values of their own half of it; kv_stride apart */
    size_t kv_stride;
    float *out; /* heads of one rank after the other: [ranks][tokens] rows of out_width, [heads * dim] in each */
    int out_width;
    int writes_lse; /* log-sum-exps of scores lie behind the outputs of each row */
    const struct arithmetic *arithmetic;
    int group; /* heads per KV head */
    int value_panels;
    int key_columns; /* of one key panel: 16, or the block size if that is no multiple of 16 */
    size_t key_bytes, value_bytes; /* one block of one KV head */
    char *q; /* [kv_heads][tokens][group] rows, rotated and scaled, in the arithmetic's form */
    size_t q_stride;
    const struct item *items;
    int num_items, items_per_chunk;
    int num_spans; /* of the longest context */
    char *work; /* every thread's */
    size_t work_bytes;
    char *partials; /* of every (item, span), when spans are given to several threads */
    const struct sharing *sharing;
    const struct shared_item *shared_items;
    int num_shared_items, shared_per_chunk, threads;
    char *shared_partials; /* of every row of every shared span */
};

/* How many of a sequence's first `count` tokens are kept here: the place of the next one, if it is kept too. */
INLINE int kept(const struct layer *l, int count)
{
    if (l->ranks == 1) return count;
    int whole = l->block_size * l->ranks, newest = count % whole - l->place * l->block_size;
    return count / whole * l->block_size + (newest < 0 ? 0 : newest < l->block_size ? newest : l->block_size);
}

INLINE int keeps(const struct layer *l, int position) { return position / l->block_size % l->ranks == l->place; }

/* Numbers of a head's value. */
INLINE int value_dim(const struct layer *l) { return l->value_dim ? l->value_dim : l->dim; }

/* Fill in where the cache's parts lie. */
void cache_describe(struct call *c);

/* Norm and rotate every token's q and k; q goes to c->q, k and v into the cache. */
void cache_write(struct pool *pool, struct call *c);

/* The panels of a KV head's tiles, 16 positions each, that cover [first, end) of what is kept of a sequence; first is a
 * multiple of 16.
 * Returns the bytes from a tile's value panel to its next. Where blocks are no multiple of 16 positions the tiles are
 * put together in `spare`, of cache_spare_bytes for so many tiles. */
size_t cache_tiles(const struct call *c, int sequence, int kv_head, int first, int end, const char **keys,
                   const char **values, char *spare);
size_t cache_spare_bytes(const struct call *c, int tiles);

/* One layer's attention of a step, whose `sharing` is attention_sharing's of any of its layers. Where ranks share out
 * tokens, all of them call it at once; returns 0, or 1 + the rank that was lost. */
struct sharing attention_sharing(struct pool *pool, const struct layer *l, const struct batch *b);
int attention_run_shared(struct pool *pool, struct ranks *ranks, const struct layer *l, const struct batch *b,
                         const struct sharing *sharing, const float *qkv, float *out);
