/* The blocks of errand.h. */
#include "errand.h"

#define MOST_BYTES (12 << 20) /* of one layer: they must stay in the third-level cache, which others use too */

struct errand errand_new(struct pool *pool, const struct layer *l, const struct batch *b)
{
    const struct arithmetic *f = arithmetic_at(l->arithmetic);
    struct call c = {.layer = l, .batch = b, .arithmetic = f};
    cache_describe(&c);
    struct errand errand = {.key_bytes = l->kv_heads * c.key_bytes, .value_bytes = l->kv_heads * c.value_bytes};
    int most = (int)(MOST_BYTES / (errand.key_bytes + errand.value_bytes)), count = 0;
    for (int s = 0; s < b->sequences; s++) count += ceil_div(b->context_lens[s], l->block_size);
    int32_t *blocks = pool_scratch(pool, SCRATCH_ERRAND, (size_t)count * sizeof *blocks);
    errand.blocks = blocks;
    for (int s = 0; s < b->sequences; s++) {
        const int32_t *table = b->block_tables + (size_t)s * b->table_stride;
        int own = ceil_div(b->context_lens[s], l->block_size);
        memcpy(blocks, table, (size_t)own * sizeof *blocks);
        blocks += own;
    }
    errand.count = 2 * (count < most ? count : most);
    atomic_init(&errand.next, errand.count);
    return errand;
}

void errand_begin(struct errand *errand, const struct layer *l)
{
    errand->keys = l->keys;
    errand->values = l->values;
    atomic_store(&errand->next, 0);
}
