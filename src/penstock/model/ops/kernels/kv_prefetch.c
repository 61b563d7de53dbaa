/* The blocks of kv_prefetch.h.
 *
 * Shapes: steps of more rows than one tile, up to 12 MiB of blocks a layer. Limit: memory, which the products leave
 * idle meanwhile. Its share was not measured. */
#include "kv_prefetch.h"

#define MAX_BYTES (12 << 20) /* of one layer: they must stay in the third-level cache, which others use too */

struct kv_prefetch kv_prefetch_new(struct pool *pool, const struct layer *l, const struct batch *b)
{
    const struct arithmetic *f = arithmetic_at(l->arithmetic);
    struct call c = {.layer = l, .batch = b, .arithmetic = f};
    cache_describe(&c);
    struct kv_prefetch prefetch = {.key_bytes = l->kv_heads * c.key_bytes, .value_bytes = l->kv_heads * c.value_bytes};
    int most = (int)(MAX_BYTES / (prefetch.key_bytes + prefetch.value_bytes)), count = 0;
    for (int s = 0; s < b->sequences; s++) count += ceil_div(kept(l, b->context_lens[s]), l->block_size);
    int32_t *blocks = pool_scratch(pool, SCRATCH_KV_PREFETCH, (size_t)count * sizeof *blocks);
    prefetch.blocks = blocks;
    for (int s = 0; s < b->sequences; s++) {
        const int32_t *table = b->block_tables + (size_t)s * b->table_stride;
        int own = ceil_div(kept(l, b->context_lens[s]), l->block_size);
        memcpy(blocks, table, (size_t)own * sizeof *blocks);
        blocks += own;
    }
    prefetch.count = 2 * (count < most ? count : most);
    atomic_init(&prefetch.next, prefetch.count);
    return prefetch;
}

void kv_prefetch_begin(struct kv_prefetch *prefetch, const struct layer *l)
{
    prefetch->keys = l->keys;
    prefetch->values = l->values;
    atomic_store(&prefetch->next, 0);
}
