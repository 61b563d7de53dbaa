/* Causal attention over a cache of blocks: any mix of prefill chunks and single tokens in one call.
 *
 * First every token's q and k are normed and rotated, and k and v written into the cache; then the queries of each
 * sequence and KV head are cut in tiles of rows (a row is one query of one head), and each tile attends.
 *
 * A row's context is cut in spans at fixed absolute positions. A span is attended alone, with its own maximum, and the
 * spans are merged in order. So a row's result depends on its keys and its position only: not on the chunk it came in,
 * not on the rows beside it, nor on whether its spans were computed by one thread or by several. */
#include "pool.h"
#include "product.h"

#include <math.h>

#define SPAN 256 /* positions */
#define SPAN_TILES (SPAN / PANEL)
#define SCORE_STRIDE (SPAN + PANEL) /* not a power of two: rows must not share cache sets */

/* This struct and the next are mirrored in native.py. */
struct layer {
    char *keys; /* [blocks][kv_heads][block_size / columns] panels: columns are positions, k are dimensions */
    char *values; /* [blocks][kv_heads][dim / 16] panels: columns are dimensions, k are positions */
    const float *cos, *sin; /* [context, dim / 2] */
    const float *q_norm, *k_norm; /* [dim], or NULL */
    int32_t arithmetic, block_size, heads, kv_heads, dim;
    int32_t window; /* 0: all */
    float scale, norm_eps;
};

struct batch {
    const int32_t *positions; /* [tokens] */
    const int32_t *query_starts; /* [sequences + 1] */
    const int32_t *context_lens; /* [sequences] */
    const int32_t *block_tables; /* [sequences, table_stride] */
    int32_t table_stride, sequences, tokens;
};

struct item { /* a tile of rows: row / group is a query of the sequence, row % group a head of the KV head */
    int sequence, kv_head, row, rows;
};

struct partial { /* one row over one span, or over all spans so far */
    float max, sum;
};

struct call {
    const struct layer *layer;
    const struct batch *batch;
    const float *qkv; /* [tokens, (heads + 2 * kv_heads) * dim] */
    float *out; /* [tokens, heads * dim] */
    const struct arithmetic *arithmetic;
    int group; /* heads per KV head */
    int key_columns; /* of one key panel: 16, or the block size if that is no multiple of 16 */
    int value_panels;
    size_t key_head_bytes, value_head_bytes; /* one block of one KV head */
    char *q; /* [kv_heads][tokens][group] rows, rotated and scaled, in the arithmetic's form */
    size_t q_stride;
    const struct item *items;
    int num_items, num_spans; /* spans of the longest context */
    char *work; /* of every thread */
    size_t work_bytes;
    char *partials; /* of every (item, span), when spans are shared out */
    int tokens_per_chunk;
};

struct result { /* of a tile of rows, wherever it lies */
    struct partial *rows; /* [MOST_ROWS] */
    float *sums; /* [MOST_ROWS][value_panels * 16] */
};

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }
static int ceil_div(int a, int b) { return (a + b - 1) / b; }
static size_t to_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* -- the cache ---------------------------------------------------------------------------------------------- */

static int key_columns(int block_size) { return block_size % PANEL ? block_size : PANEL; }

static size_t head_bytes(const struct arithmetic *f, int positions, int dim)
{
    return (size_t)positions * dim * f->weight_bytes;
}

static size_t values_head_bytes(const struct arithmetic *f, int block_size, int dim)
{
    return ceil_div(dim, PANEL) * panel_bytes(f, block_size);
}

size_t key_block_bytes(int arithmetic, int block_size, int kv_heads, int dim)
{
    return kv_heads * head_bytes(arithmetic_at(arithmetic), block_size, dim);
}

size_t value_block_bytes(int arithmetic, int block_size, int kv_heads, int dim)
{
    return kv_heads * values_head_bytes(arithmetic_at(arithmetic), block_size, dim);
}

INLINE size_t key_offset(const struct call *c, int slot, int d)
{
    return (size_t)(slot / c->key_columns) * c->key_columns * c->layer->dim +
           panel_offset(c->arithmetic, d, slot % c->key_columns, c->key_columns);
}

INLINE char *block_of(const struct call *c, char *cache, size_t bytes, int sequence, int position, int kv_head)
{
    const struct layer *a = c->layer;
    int block = c->batch->block_tables[(size_t)sequence * c->batch->table_stride + position / a->block_size];
    return cache + ((size_t)block * a->kv_heads + kv_head) * bytes;
}

INLINE char *value_panel(const struct call *c, char *head, int panel)
{
    return head + panel * panel_bytes(c->arithmetic, c->layer->block_size);
}

/* -- before: norm, rotate, write ------------------------------------------------------------------------------ */

static void norm_head(const float *restrict x, const float *restrict weight, float *restrict out, int n, float eps)
{
    float squares = 0.0f;
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    float scale = 1.0f / sqrtf(squares / (float)n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void rotate(const struct layer *a, const float *from, const float *norm, int position, float scale,
                   float *restrict out)
{
    int half = a->dim / 2;
    const float *restrict cos = a->cos + (size_t)position * half, *restrict sin = a->sin + (size_t)position * half;
    float normed[256];
    if (norm) {
        norm_head(from, norm, normed, a->dim, a->norm_eps);
        from = normed;
    }
    for (int i = 0; i < half; i++) {
        out[i] = (from[i] * cos[i] - from[i + half] * sin[i]) * scale;
        out[i + half] = (from[i + half] * cos[i] + from[i] * sin[i]) * scale;
    }
}

static void write_token(const struct call *c, int sequence, int token, int kv_head)
{
    const struct layer *a = c->layer;
    const struct arithmetic *f = c->arithmetic;
    int position = c->batch->positions[token], slot = position % a->block_size;
    const float *row = c->qkv + (size_t)token * (a->heads + 2 * a->kv_heads) * a->dim;
    float key[256];
    rotate(a, row + (size_t)(a->heads + kv_head) * a->dim, a->k_norm, position, 1.0f, key);
    char *keys = block_of(c, a->keys, c->key_head_bytes, sequence, position, kv_head);
    for (int d = 0; d < a->dim; d++) panel_put(f, keys, key_offset(c, slot, d), key[d]);

    const float *value = row + (size_t)(a->heads + a->kv_heads + kv_head) * a->dim;
    char *values = block_of(c, a->values, c->value_head_bytes, sequence, position, kv_head);
    /* A step of k may reach past the newest position; what a former owner of the block left there must not be NaN. */
    int end = position + 1 < c->batch->context_lens[sequence] ? slot + 1 : ceil_div(slot + 1, f->step) * f->step;
    for (int k = slot; k < end; k++)
        for (int d = 0; d < a->dim; d++)
            panel_put(f, value_panel(c, values, d / PANEL), panel_offset(f, k, d % PANEL, PANEL), k == slot ? value[d] : 0);
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
    const struct layer *a = c->layer;
    int end = least((chunk + 1) * c->tokens_per_chunk, c->batch->tokens);
    for (int token = chunk * c->tokens_per_chunk; token < end; token++) {
        int sequence = sequence_of(c->batch, token);
        const float *row = c->qkv + (size_t)token * (a->heads + 2 * a->kv_heads) * a->dim;
        for (int kv_head = 0; kv_head < a->kv_heads; kv_head++) {
            write_token(c, sequence, token, kv_head);
            for (int g = 0; g < c->group; g++) {
                float q[256];
                rotate(a, row + (size_t)(kv_head * c->group + g) * a->dim, a->q_norm, c->batch->positions[token], a->scale, q);
                char *to = c->q + (((size_t)kv_head * c->batch->tokens + token) * c->group + g) * c->q_stride;
                c->arithmetic->convert(q, to, a->dim);
            }
        }
    }
}

/* -- one tile of rows over one span ---------------------------------------------------------------------------- */

struct work { /* a thread's own */
    float scores[MOST_ROWS * SCORE_STRIDE];
    float weights[MOST_ROWS * SCORE_STRIDE]; /* of the values, in the arithmetic's form */
    struct partial rows[2][MOST_ROWS];
    const char *keys[SPAN_TILES];
    const char *values[SPAN_TILES];
    const char *panels[SPAN_TILES * MOST_PANELS];
    /* then: two tiles of sums, and a span's keys and values where blocks must be regathered */
};

struct range {
    int from, to; /* positions */
};

static struct range seen_by(const struct call *c, const struct item *item, int row)
{
    const struct layer *a = c->layer;
    int s = item->sequence, queries = c->batch->query_starts[s + 1] - c->batch->query_starts[s];
    int position = c->batch->context_lens[s] - queries + row / c->group;
    return (struct range){a->window ? most(0, position - a->window + 1) : 0, position + 1};
}

/* Copy a tile of 16 positions out of blocks whose size is no multiple of 16. */
static void gather_tile(const struct call *c, const struct item *item, int position, int end, char *keys, char *values)
{
    const struct layer *a = c->layer;
    const struct arithmetic *f = c->arithmetic;
    size_t panel = panel_bytes(f, PANEL);
    memset(values, 0, c->value_panels * panel);
    for (int p = position; p < least(position + PANEL, end); p++) {
        int slot = p % a->block_size;
        char *from_keys = block_of(c, a->keys, c->key_head_bytes, item->sequence, p, item->kv_head);
        char *from_values = block_of(c, a->values, c->value_head_bytes, item->sequence, p, item->kv_head);
        for (int d = 0; d < a->dim; d++) {
            float key = panel_get(f, from_keys, key_offset(c, slot, d));
            float value = panel_get(f, value_panel(c, from_values, d / PANEL), panel_offset(f, slot, d % PANEL, PANEL));
            panel_put(f, keys, panel_offset(f, d, p - position, PANEL), key);
            panel_put(f, values + d / PANEL * panel, panel_offset(f, p - position, d % PANEL, PANEL), value);
        }
    }
}

/* Where the tiles' key panels and first value panels are. Returns the bytes from one value panel to the next. */
static size_t find_tiles(const struct call *c, const struct item *item, int first, int end, struct work *w, char *spare)
{
    const struct layer *a = c->layer;
    size_t tile_bytes = panel_bytes(c->arithmetic, PANEL);
    for (int t = 0; first + t * PANEL < end; t++) {
        int position = first + t * PANEL, slot = position % a->block_size;
        if (c->key_columns == PANEL) {
            w->keys[t] = block_of(c, a->keys, c->key_head_bytes, item->sequence, position, item->kv_head) +
                         head_bytes(c->arithmetic, slot, a->dim);
            w->values[t] = block_of(c, a->values, c->value_head_bytes, item->sequence, position, item->kv_head) +
                           slot / PANEL * tile_bytes;
            continue;
        }
        char *keys = spare + t * (panel_bytes(c->arithmetic, a->dim) + c->value_panels * tile_bytes);
        char *values = keys + panel_bytes(c->arithmetic, a->dim);
        gather_tile(c, item, position, end, keys, values);
        w->keys[t] = keys;
        w->values[t] = values;
    }
    return c->key_columns == PANEL ? panel_bytes(c->arithmetic, a->block_size) : tile_bytes;
}

static void score(const struct call *c, const struct item *item, int tiles, struct work *w)
{
    const struct layer *a = c->layer;
    size_t row = ((size_t)item->kv_head * c->batch->tokens + c->batch->query_starts[item->sequence]) * c->group + item->row;
    int depth = a->dim / c->arithmetic->step;
    for (int t = 0; t < tiles; t += MOST_PANELS) {
        struct product p = {c->q + row * c->q_stride, c->q_stride, w->keys + t, 1, depth, depth,
                            w->scores + t * PANEL, SCORE_STRIDE, NULL, {0}};
        for (int i = 0; i < least(MOST_PANELS, tiles - t); i++) p.ahead[i] = w->values[t + i]; /* next: their values */
        c->arithmetic->kernels[item->rows][least(MOST_PANELS, tiles - t)](&p);
    }
}

/* Scores to weights, in place: e to the (score - the greatest), 0 outside [from, to). */
static struct partial weigh(float *scores, int from, int to, int count)
{
    for (int i = 0; i < from; i++) scores[i] = -INFINITY;
    for (int i = to; i < count; i++) scores[i] = -INFINITY;
    vf greatest = splat(-INFINITY), sum = splat(0.0f);
    for (int i = 0; i < count; i += VL) greatest = vmax(greatest, load(scores + i));
    float max = max_of(greatest);
    for (int i = 0; i < count; i += VL) {
        vf weight = vexp(load(scores + i) - max);
        store(scores + i, weight);
        sum += weight;
    }
    return (struct partial){max, sum_of(sum)};
}

static void attend_span(const struct call *c, const struct item *item, int span, struct work *w, char *spare,
                        struct result result)
{
    struct range lowest = seen_by(c, item, item->row), highest = seen_by(c, item, item->row + item->rows - 1);
    int first = most(span * SPAN, lowest.from / PANEL * PANEL), end = least((span + 1) * SPAN, highest.to);
    for (int r = 0; r < item->rows; r++) result.rows[r] = (struct partial){-INFINITY, 0.0f};
    if (first >= end) return;
    int tiles = ceil_div(end - first, PANEL), count = tiles * PANEL;
    size_t panel_stride = find_tiles(c, item, first, end, w, spare);
    score(c, item, tiles, w);

    size_t weight_stride = SCORE_STRIDE * (size_t)c->arithmetic->row_bytes;
    for (int r = 0; r < item->rows; r++) {
        struct range seen = seen_by(c, item, item->row + r);
        int from = least(most(seen.from - first, 0), count), to = most(least(seen.to - first, count), 0);
        float *scores = w->scores + r * SCORE_STRIDE;
        if (from < to) result.rows[r] = weigh(scores, from, to, count);
        else memset(scores, 0, 4 * (size_t)count);
        c->arithmetic->convert(scores, (char *)w->weights + r * weight_stride, count);
    }

    int step = c->arithmetic->step, last = ceil_div(end - first - (tiles - 1) * PANEL, step);
    for (int v = 0; v < c->value_panels; v += MOST_PANELS) {
        int panels = least(MOST_PANELS, c->value_panels - v);
        for (int t = 0; t < tiles; t++)
            for (int p = 0; p < panels; p++) w->panels[t * panels + p] = w->values[t] + (v + p) * panel_stride;
        struct product product = {w->weights, weight_stride, w->panels, tiles, PANEL / step, last,
                                  result.sums + v * PANEL, (size_t)c->value_panels * PANEL, NULL, {0}};
        for (int p = 0; p < panels; p++) product.ahead[p] = w->panels[p];
        c->arithmetic->kernels[item->rows][panels](&product);
    }
}

/* -- spans together ---------------------------------------------------------------------------------------------- */

/* One function, never inlined, so that a merge is the same instructions wherever it happens. */
static __attribute__((noinline)) void merge_row(struct partial *into, float *sums, const struct partial *from,
                                                const float *more, int n)
{
    if (from->max == -INFINITY) return;
    if (into->max == -INFINITY) {
        *into = *from;
        memcpy(sums, more, 4 * (size_t)n);
        return;
    }
    float max = into->max > from->max ? into->max : from->max;
    float keep = vexp(splat(into->max - max))[0], add = vexp(splat(from->max - max))[0];
    for (int i = 0; i < n; i += VL) store(sums + i, load(sums + i) * keep + load(more + i) * add);
    into->sum = into->sum * keep + from->sum * add;
    into->max = max;
}

static void merge(const struct call *c, const struct item *item, struct result into, struct result from)
{
    int n = c->value_panels * PANEL;
    for (int r = 0; r < item->rows; r++) merge_row(into.rows + r, into.sums + r * n, from.rows + r, from.sums + r * n, n);
}

static void write_result(const struct call *c, const struct item *item, struct result result)
{
    const struct layer *a = c->layer;
    for (int r = 0; r < item->rows; r++) {
        int row = item->row + r, token = c->batch->query_starts[item->sequence] + row / c->group;
        int head = item->kv_head * c->group + row % c->group;
        float *out = c->out + ((size_t)token * a->heads + head) * a->dim;
        const float *sums = result.sums + r * c->value_panels * PANEL;
        float scale = 1.0f / result.rows[r].sum;
        for (int d = 0; d < a->dim; d++) out[d] = sums[d] * scale;
    }
}

static size_t sums_bytes(const struct call *c) { return 4 * (size_t)MOST_ROWS * c->value_panels * PANEL; }

static struct result partial_at(const struct call *c, int item, int span)
{
    size_t rows_bytes = to_line(MOST_ROWS * sizeof(struct partial));
    char *at = c->partials + ((size_t)item * c->num_spans + span) * (rows_bytes + sums_bytes(c));
    return (struct result){(struct partial *)at, (float *)(at + rows_bytes)};
}

static struct range spans_of(const struct call *c, const struct item *item)
{
    return (struct range){seen_by(c, item, item->row).from / SPAN,
                          ceil_div(seen_by(c, item, item->row + item->rows - 1).to, SPAN)};
}

static void attend_item(void *argument, int index, int thread)
{
    const struct call *c = argument;
    const struct item *item = c->items + index;
    struct work *w = (struct work *)(c->work + thread * c->work_bytes);
    float *sums = (float *)((char *)w + to_line(sizeof *w));
    char *spare = (char *)sums + 2 * sums_bytes(c);
    struct result all = {w->rows[0], sums}, one = {w->rows[1], sums + sums_bytes(c) / 4};
    struct range spans = spans_of(c, item);
    attend_span(c, item, spans.from, w, spare, all);
    for (int span = spans.from + 1; span < spans.to; span++) {
        attend_span(c, item, span, w, spare, one);
        merge(c, item, all, one);
    }
    write_result(c, item, all);
}

static void attend_part(void *argument, int index, int thread)
{
    const struct call *c = argument;
    const struct item *item = c->items + index / c->num_spans;
    struct range spans = spans_of(c, item);
    int span = index % c->num_spans;
    if (span < spans.from || span >= spans.to) return;
    struct work *w = (struct work *)(c->work + thread * c->work_bytes);
    char *spare = (char *)w + to_line(sizeof *w) + 2 * sums_bytes(c);
    attend_span(c, item, span, w, spare, partial_at(c, index / c->num_spans, span));
}

static void merge_parts(void *argument, int index, int thread)
{
    (void)thread;
    const struct call *c = argument;
    const struct item *item = c->items + index;
    struct range spans = spans_of(c, item);
    struct result all = partial_at(c, index, spans.from);
    for (int span = spans.from + 1; span < spans.to; span++) merge(c, item, all, partial_at(c, index, span));
    write_result(c, item, all);
}

/* KV head by KV head, so that sequences that share a prefix find it in the cache; long contexts first. */
static void list_items(struct pool *pool, struct call *c)
{
    const struct layer *a = c->layer;
    int tiles = 0, longest = 0;
    for (int s = 0; s < c->batch->sequences; s++) {
        tiles += ceil_div((c->batch->query_starts[s + 1] - c->batch->query_starts[s]) * c->group, MOST_ROWS);
        longest = most(longest, c->batch->context_lens[s]);
    }
    struct item *items = pool_scratch(pool, SCRATCH_ITEMS, (size_t)tiles * a->kv_heads * sizeof *items);
    c->items = items;
    c->num_items = tiles * a->kv_heads;
    c->num_spans = ceil_div(longest, SPAN);
    for (int kv_head = 0; kv_head < a->kv_heads; kv_head++)
        for (int s = 0; s < c->batch->sequences; s++) {
            int rows = (c->batch->query_starts[s + 1] - c->batch->query_starts[s]) * c->group;
            for (int tile = ceil_div(rows, MOST_ROWS) - 1; tile >= 0; tile--)
                *items++ = (struct item){s, kv_head, tile * MOST_ROWS, least(MOST_ROWS, rows - tile * MOST_ROWS)};
        }
}

void attention_run(struct pool *pool, const struct layer *a, const struct batch *b, const float *qkv, float *out)
{
    const struct arithmetic *f = arithmetic_at(a->arithmetic);
    struct call c = {.layer = a, .batch = b, .qkv = qkv, .out = out, .arithmetic = f};
    c.group = a->heads / a->kv_heads;
    c.key_columns = key_columns(a->block_size);
    c.value_panels = ceil_div(a->dim, PANEL);
    c.key_head_bytes = head_bytes(f, a->block_size, a->dim);
    c.value_head_bytes = values_head_bytes(f, a->block_size, a->dim);
    c.q_stride = (size_t)a->dim * f->row_bytes;
    c.q = pool_scratch(pool, SCRATCH_ROWS, (size_t)b->tokens * a->heads * c.q_stride);
    c.tokens_per_chunk = 4;
    pool_run(pool, ceil_div(b->tokens, c.tokens_per_chunk), write_chunk, &c);

    list_items(pool, &c);
    size_t regathered = c.key_columns == PANEL
                            ? 0
                            : SPAN_TILES * (panel_bytes(f, a->dim) + c.value_panels * panel_bytes(f, PANEL));
    c.work_bytes = to_line(sizeof(struct work)) + 2 * sums_bytes(&c) + regathered + 192;
    c.work = pool_scratch(pool, SCRATCH_WORK, c.work_bytes * pool_threads(pool));
    if (c.num_items >= 4 * pool_threads(pool) || c.num_spans == 1) {
        pool_run(pool, c.num_items, attend_item, &c);
        return;
    }
    size_t partial_bytes = to_line(MOST_ROWS * sizeof(struct partial)) + sums_bytes(&c);
    c.partials = pool_scratch(pool, SCRATCH_PARTIALS, (size_t)c.num_items * c.num_spans * partial_bytes);
    pool_run(pool, c.num_items * c.num_spans, attend_part, &c);
    pool_run(pool, c.num_items, merge_parts, &c);
}
