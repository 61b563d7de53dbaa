/* Blocks of the cache that are read next, handed out piece by piece. A step of many sequences reads as many bytes of keys
 * and values as it reads weights, and in products of many rows memory has little to do: so the products before a
 * layer's attention fetch what it will read.
 *
 * Shapes: blocks of any size, in huge pages. kv_prefetch.c has the limit. */
#pragma once

#include "attention.h"

#include <stdatomic.h>

struct kv_prefetch {
    const int32_t *blocks; /* of all sequences */
    int count; /* pieces: a block's keys, or its values */
    const char *keys, *values;
    size_t key_bytes, value_bytes; /* of a block */
    atomic_int next;
};

/* The blocks of a step, for any of its layers: no more than stay in the cache until they are read. */
struct kv_prefetch kv_prefetch_new(struct pool *pool, const struct layer *l, const struct batch *b);

/* They are this layer's from now on. */
void kv_prefetch_begin(struct kv_prefetch *prefetch, const struct layer *l);

/* A piece, or NULL if there is none left. */
INLINE const char *kv_prefetch_take(struct kv_prefetch *prefetch)
{
    if (!prefetch || atomic_load_explicit(&prefetch->next, memory_order_relaxed) >= prefetch->count) return NULL;
    int piece = atomic_fetch_add_explicit(&prefetch->next, 1, memory_order_relaxed);
    if (piece >= prefetch->count) return NULL;
    size_t block = (size_t)prefetch->blocks[piece / 2];
    return piece % 2 ? prefetch->values + block * prefetch->value_bytes : prefetch->keys + block * prefetch->key_bytes;
}
