/* The KV cache: how keys and values get into their blocks, and how tiles of 16 positions come out.
 *
 * Shapes: any number of new tokens, head sizes of multiples of 8 up to 576, blocks of any size. Limit: memory, for
 * what is written and read once. A part of attention's time, not measured by itself. */
#include "attention.h"
#include "rows.h"

#define CHUNK_TOKENS 4

static int key_columns(int block_size) { return block_size % PANEL ? block_size : PANEL; }

/* Of a key panel's column, its scales included. */
static int key_steps(const struct arithmetic *f, int dim) { return dim / f->step + f->has_scales; }

static size_t key_bytes(const struct arithmetic *f, int block_size, int dim)
{
    return (size_t)key_steps(f, dim) * block_size * STEP_BYTES;
}

static size_t value_bytes(const struct arithmetic *f, int block_size, int dim)
{
    return ceil_div(dim, PANEL) * panel_bytes(f, block_size);
}

size_t key_block_bytes(int arithmetic, int block_size, int kv_heads, int dim)
{
    return kv_heads * key_bytes(arithmetic_at(arithmetic), block_size, dim);
}

size_t value_block_bytes(int arithmetic, int block_size, int kv_heads, int dim)
{
    return kv_heads * value_bytes(arithmetic_at(arithmetic), block_size, dim);
}

void cache_describe(struct call *c)
{
    const struct layer *l = c->layer;
    c->value_panels = ceil_div(value_dim(l), PANEL);
    c->key_columns = key_columns(l->block_size);
    c->key_bytes = key_bytes(c->arithmetic, l->block_size, l->dim);
    c->value_bytes = l->value_dim ? 0 : value_bytes(c->arithmetic, l->block_size, l->dim);
}

struct slot { /* a position's place in its block */
    char *keys; /* the panel that holds it */
    int column; /* and where in that */
    char *values; /* the block's panels */
    int index; /* in the block */
};

/* `position`: among those that are kept here. */
INLINE struct slot slot_of(const struct call *c, int sequence, int position, int kv_head)
{
    const struct layer *l = c->layer;
    int index = position % l->block_size;
    int block = c->batch->block_tables[(size_t)sequence * c->batch->table_stride + position / l->block_size];
    size_t head = (size_t)block * l->kv_heads + kv_head;
    int panel = c->key_columns == PANEL ? index / PANEL : 0;
    return (struct slot){l->keys + head * c->key_bytes + panel * key_bytes(c->arithmetic, PANEL, l->dim),
                         index - panel * PANEL, l->values + head * c->value_bytes, index};
}

/* -- in ------------------------------------------------------------------------------------------------------- */

static void rotate(const struct layer *l, const float *from, const float *norm, int position, float scale, float *out)
{
    int half = l->dim / 2, i = 0;
    const float *cos = l->cos ? l->cos + (size_t)position * half : NULL, *sin = cos ? l->sin + (size_t)position * half : NULL;
    float normed[MOST_DIM];
    if (!l->cos) {
        for (; i < l->dim; i++) out[i] = from[i] * scale;
        return;
    }
    if (norm) {
        norm_row(from, NULL, norm, normed, l->dim, l->norm_eps);
        from = normed;
    }
    for (; i + VL <= half; i += VL) {
        vf a = load(from + i), b = load(from + i + half), c = load(cos + i), s = load(sin + i);
        store(out + i, (a * c - b * s) * scale);
        store(out + i + half, (b * c + a * s) * scale);
    }
    for (; i < half; i++) {
        float a = from[i], b = from[i + half];
        out[i] = (a * cos[i] - b * sin[i]) * scale;
        out[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

/* `value`: NULL where it is a part of the key. */
static void write_token(const struct call *c, int sequence, int token, int kv_head, const float *key, const float *value)
{
    const struct layer *l = c->layer;
    const struct arithmetic *f = c->arithmetic;
    int position = c->batch->positions[token], place = kept(l, position);
    struct slot slot = slot_of(c, sequence, place, kv_head);
    float rotated[MOST_DIM];
    char stored_key[(MOST_DIM + 1) * STEP_BYTES], stored[(MOST_DIM + 1) * STEP_BYTES] = {0};
    rotate(l, key, l->k_norm, position, 1.0f, rotated);
    f->encode(rotated, stored_key, l->dim);
    if (value) f->encode(value, stored, l->dim);
    if (f->has_scales) memcpy(stored_key + l->dim + 2, stored + l->dim, 2);
    panel_put_column(slot.keys, slot.column, c->key_columns, stored_key, key_steps(f, l->dim));
    if (!value) return;

    static const char nothing[PANEL * STEP_BYTES];
    int is_newest = place + 1 == kept(l, c->batch->context_lens[sequence]);
    for (int panel = 0; panel < c->value_panels; panel++) {
        char *to = slot.values + panel * panel_bytes(f, l->block_size);
        panel_put_row(f, to, slot.index, stored + panel * PANEL * (STEP_BYTES / f->step));
        /* A step of k may reach past the newest position: what a block's former owner left there may be NaN. */
        for (int k = slot.index + 1; is_newest && k % f->step; k++) panel_put_row(f, to, k, nothing);
    }
}

static int sequence_of(const struct batch *b, int token)
{
    int low = 0, high = b->sequences;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (b->query_starts[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

static void write_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct call *c = argument;
    const struct layer *l = c->layer;
    for (int token = chunk * CHUNK_TOKENS; token < (chunk + 1) * CHUNK_TOKENS && token < c->batch->tokens; token++) {
        int sequence = sequence_of(c->batch, token), position = c->batch->positions[token];
        const float *q = c->queries + (size_t)token * c->query_stride;
        const float *k = c->kv + (size_t)token * c->kv_stride, *v = l->value_dim ? NULL : k + (size_t)l->kv_heads * l->dim;
        int is_kept = keeps(l, position);
        for (int kv_head = 0; kv_head < l->kv_heads; kv_head++) {
            if (is_kept) write_token(c, sequence, token, kv_head, k + kv_head * l->dim, v ? v + kv_head * l->dim : NULL);
            char *to = c->q + ((size_t)kv_head * c->batch->tokens + token) * c->group * c->q_stride;
            for (int g = 0; g < c->group; g++) {
                float rotated[MOST_DIM];
                rotate(l, q + (size_t)(kv_head * c->group + g) * l->dim, l->q_norm, position, l->scale, rotated);
                c->arithmetic->convert(rotated, to + g * c->q_stride, l->dim);
            }
        }
    }
}

void cache_write(struct pool *pool, struct call *c)
{
    pool_run(pool, ceil_div(c->batch->tokens, CHUNK_TOKENS), write_chunk, c);
}

/* -- out ------------------------------------------------------------------------------------------------------ */

/* A key's first dimensions, as the value at place `k` of a tile. What the last panel has more means nothing. */
static void put_value(const struct call *c, const char *stored_key, int k, char *values)
{
    const struct arithmetic *f = c->arithmetic;
    for (int panel = 0; panel < c->value_panels; panel++)
        panel_put_row(f, values + panel * panel_bytes(f, PANEL), k, stored_key + panel * PANEL * (STEP_BYTES / f->step));
}

/* Copy up to 16 positions together, out of blocks whose size is no multiple of 16. */
static void gather_tile(const struct call *c, int sequence, int kv_head, int first, int end, char *keys, char *values)
{
    const struct arithmetic *f = c->arithmetic;
    int steps = key_steps(f, c->layer->dim);
    char stored[(MOST_DIM + 1) * STEP_BYTES];
    memset(values, 0, c->value_panels * panel_bytes(f, PANEL));
    for (int k = 0; k < PANEL && first + k < end; k++) {
        struct slot slot = slot_of(c, sequence, first + k, kv_head);
        panel_get_column(slot.keys, slot.column, c->key_columns, stored, steps);
        panel_put_column(keys, k, PANEL, stored, steps);
        if (c->layer->value_dim) {
            put_value(c, stored, k, values);
            continue;
        }
        for (int panel = 0; panel < c->value_panels; panel++) {
            panel_get_row(f, slot.values + panel * panel_bytes(f, c->layer->block_size), slot.index, stored);
            panel_put_row(f, values + panel * panel_bytes(f, PANEL), k, stored);
        }
    }
}

/* The values of up to 16 positions that are a part of their keys: `keys` is the panel of these. */
static void transpose_tile(const struct call *c, const char *keys, int count, char *values)
{
    const struct arithmetic *f = c->arithmetic;
    char stored[(MOST_DIM + 1) * STEP_BYTES];
    memset(values, 0, c->value_panels * panel_bytes(f, PANEL));
    for (int k = 0; k < PANEL && k < count; k++) {
        panel_get_column(keys, k, PANEL, stored, key_steps(f, c->layer->dim));
        put_value(c, stored, k, values);
    }
}

size_t cache_tiles(const struct call *c, int sequence, int kv_head, int first, int end, const char **keys,
                   const char **values, char *spare)
{
    const struct arithmetic *f = c->arithmetic;
    for (int position = first; position < end; position += PANEL, keys++, values++) {
        if (c->key_columns == PANEL) {
            struct slot slot = slot_of(c, sequence, position, kv_head);
            *keys = slot.keys;
            *values = slot.values + panel_bytes(f, slot.index);
            if (!c->layer->value_dim) continue;
            transpose_tile(c, slot.keys, end - position, spare);
            *values = spare;
            spare += cache_spare_bytes(c, 1);
            continue;
        }
        char *tile_values = spare + key_bytes(f, PANEL, c->layer->dim);
        gather_tile(c, sequence, kv_head, position, end, spare, tile_values);
        *keys = spare;
        *values = tile_values;
        spare += cache_spare_bytes(c, 1);
    }
    return panel_bytes(f, c->key_columns == PANEL && !c->layer->value_dim ? c->layer->block_size : PANEL);
}

size_t cache_spare_bytes(const struct call *c, int tiles)
{
    const struct arithmetic *f = c->arithmetic;
    size_t values = c->value_panels * panel_bytes(f, PANEL);
    if (c->key_columns == PANEL) return c->layer->value_dim ? tiles * values : 0;
    return tiles * (key_bytes(f, PANEL, c->layer->dim) + values);
}
