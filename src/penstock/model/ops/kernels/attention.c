/* Causal attention over a cache of blocks: any mix of prefill chunks and single tokens in one call.
 *
 * First every token's q and k are normed and rotated, and k and v written into the cache; then the queries of each
 * sequence and KV head are cut in tiles of rows (a row is one query of one head), and each tile attends.
 *
 * A row's context is cut in spans at fixed absolute positions. A span is attended alone, with its own maximum, and the
 * spans are merged in order. So a row's result depends on its keys and its position only: not on the chunk it came in,
 * not on the rows beside it, nor on whether its spans were computed by one thread or by several. */
#include "attention.h"
#include "rows.h"

#include <math.h>

#define SPAN 256 /* positions */
#define SPAN_TILES (SPAN / PANEL)
#define SCORE_STRIDE (SPAN + PANEL) /* not a power of two: rows must not share cache sets */

struct item { /* a tile of rows: row / group is a query of the sequence, row % group a head of the KV head */
    int sequence, kv_head, row, rows;
};

struct partial { /* softmax of one row over one span, or over all spans so far */
    float max, sum;
};

struct result { /* of a tile of rows, wherever it lies */
    struct partial *rows; /* [MOST_ROWS] */
    float *sums; /* [MOST_ROWS][value_panels * 16] */
};

struct work { /* a thread's own; two tiles of sums and the cache's spare bytes follow it */
    float scores[MOST_ROWS * SCORE_STRIDE];
    float weights[MOST_ROWS * SCORE_STRIDE]; /* of the values, in the arithmetic's form */
    const char *keys[SPAN_TILES];
    const char *values[SPAN_TILES];
    const char *panels[SPAN_TILES * MOST_PANELS];
    float key_scales[SPAN], value_scales[SPAN]; /* where the cache has any */
    struct partial rows[2][MOST_ROWS];
};

struct range {
    int from, to;
};

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }
static size_t to_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t sums_bytes(const struct call *c) { return 4 * (size_t)MOST_ROWS * c->value_panels * PANEL; }

static float *sums_of(const struct call *c, struct work *w, int which)
{
    return (float *)((char *)w + to_line(sizeof *w) + which * sums_bytes(c));
}

static char *spare_of(const struct call *c, struct work *w) { return (char *)sums_of(c, w, 2); }

static struct range seen_by(const struct call *c, const struct item *item, int row)
{
    int s = item->sequence, queries = c->batch->query_starts[s + 1] - c->batch->query_starts[s];
    int position = c->batch->context_lens[s] - queries + row / c->group;
    return (struct range){c->layer->window ? most(0, position - c->layer->window + 1) : 0, position + 1};
}

/* -- one tile of rows over one span ---------------------------------------------------------------------------- */

static void score(const struct call *c, const struct item *item, int tiles, struct work *w)
{
    const struct batch *b = c->batch;
    size_t row = ((size_t)item->kv_head * b->tokens + b->query_starts[item->sequence]) * c->group + item->row;
    int depth = c->layer->dim / c->arithmetic->step;
    for (int t = 0; t < tiles; t += MOST_PANELS) {
        struct product p = {c->q + row * c->q_stride, c->q_stride, w->keys + t, 1, depth, depth,
                            w->scores + t * PANEL, SCORE_STRIDE, NULL, {0}, 1.0f};
        int panels = least(MOST_PANELS, tiles - t);
        for (int i = 0; i < panels; i++) p.ahead[i] = w->values[t + i]; /* wanted next */
        c->arithmetic->kernels[item->rows][panels](&p);
    }
}

/* What lies behind the keys of `count` positions; a block's former owner may have left NaN where there are none. */
static void read_scales(const struct call *c, int count, struct work *w)
{
    size_t place = (size_t)(c->layer->dim / c->arithmetic->step) * PANEL * STEP_BYTES;
    for (int i = 0; i < count; i += VL) {
        vu both = *(const vu *)(w->keys[i / PANEL] + place + i % PANEL * STEP_BYTES);
        store(w->key_scales + i, (vf)(both << 16));
        store(w->value_scales + i, (vf)(both & 0xffff0000u));
    }
    for (int i = count; i % PANEL; i++) w->value_scales[i] = 0.0f;
}

static void multiply(float *scores, const float *scales, int count)
{
    for (int i = 0; i < count; i += VL) store(scores + i, load(scores + i) * load(scales + i));
}

/* Hide what lies outside [from, to); the greatest of the rest. */
static float mask(float *scores, int from, int to, int count)
{
    for (int i = 0; i < from; i++) scores[i] = -INFINITY;
    for (int i = to; i < count; i++) scores[i] = -INFINITY;
    vf greatest = splat(-INFINITY);
    for (int i = 0; i < count; i += VL) greatest = vmax(greatest, load(scores + i));
    return max_of(greatest);
}

/* Scores to weights, in place: e to the (score - max). Returns their sum. */
static float weigh(float *scores, float max, int count)
{
    vf sum = splat(0.0f);
    for (int i = 0; i < count; i += VL) {
        vf weight = vexp(load(scores + i) - max);
        store(scores + i, weight);
        sum += weight;
    }
    return sum_of(sum);
}

/* Every row's scores become weights, in the arithmetic's form. */
static void weigh_rows(const struct call *c, const struct item *item, int first, int count, struct work *w,
                       struct partial *rows)
{
    int has_scales = c->arithmetic->has_scales;
    for (int r = 0; r < item->rows; r++) {
        struct range seen = seen_by(c, item, item->row + r);
        if (has_scales) multiply(w->scores + r * SCORE_STRIDE, w->key_scales, count);
        if (c->layer->cap > 0) cap_row(w->scores + r * SCORE_STRIDE, count, c->layer->cap);
        int from = least(most(seen.from - first, 0), count), to = most(least(seen.to - first, count), from);
        rows[r].max = mask(w->scores + r * SCORE_STRIDE, from, to, count);
    }
    for (int r = 0; r < item->rows; r++) {
        float *scores = w->scores + r * SCORE_STRIDE;
        if (rows[r].max == -INFINITY) memset(scores, 0, 4 * (size_t)count); /* sees nothing of this span */
        else rows[r].sum = weigh(scores, rows[r].max, count);
        if (has_scales) multiply(scores, w->value_scales, count);
        c->arithmetic->convert(scores, (char *)w->weights + r * row_bytes(c->arithmetic, SCORE_STRIDE), count);
    }
}

static void attend_span(const struct call *c, const struct item *item, int span, struct work *w, struct result result)
{
    struct range lowest = seen_by(c, item, item->row), highest = seen_by(c, item, item->row + item->rows - 1);
    int first = most(span * SPAN, lowest.from / PANEL * PANEL), end = least((span + 1) * SPAN, highest.to);
    for (int r = 0; r < item->rows; r++) result.rows[r] = (struct partial){-INFINITY, 0.0f};
    if (first >= end) return;
    int tiles = ceil_div(end - first, PANEL);
    size_t panel_stride = cache_tiles(c, item->sequence, item->kv_head, first, end, w->keys, w->values, spare_of(c, w));
    score(c, item, tiles, w);
    if (c->arithmetic->has_scales) read_scales(c, end - first, w);
    weigh_rows(c, item, first, tiles * PANEL, w, result.rows);

    const struct arithmetic *f = c->arithmetic;
    int last_depth = ceil_div(end - first - (tiles - 1) * PANEL, f->step);
    for (int v = 0; v < c->value_panels; v += MOST_PANELS) {
        int panels = least(MOST_PANELS, c->value_panels - v);
        for (int t = 0; t < tiles; t++)
            for (int p = 0; p < panels; p++) w->panels[t * panels + p] = w->values[t] + (v + p) * panel_stride;
        struct product product = {w->weights, row_bytes(f, SCORE_STRIDE), w->panels, tiles, PANEL / f->step,
                                  last_depth, result.sums + v * PANEL, (size_t)c->value_panels * PANEL, NULL,
                                  {0}, 1.0f};
        for (int p = 0; p < panels; p++) product.ahead[p] = w->panels[p];
        f->kernels[item->rows][panels](&product);
    }
}

/* -- spans together ---------------------------------------------------------------------------------------------- */

/* `into` holds the spans before, `from` the next one. */
static void merge_row(struct partial *into, float *sums, const struct partial *from, const float *more, int n)
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
    const struct layer *l = c->layer;
    int n = c->value_panels * PANEL;
    for (int r = 0; r < item->rows; r++) {
        int row = item->row + r, token = c->batch->query_starts[item->sequence] + row / c->group;
        int head = item->kv_head * c->group + row % c->group;
        float *sums = result.sums + r * n, scale = 1.0f / result.rows[r].sum;
        for (int d = 0; d < n; d += VL) store(sums + d, load(sums + d) * scale);
        memcpy(c->out + ((size_t)token * l->heads + head) * l->dim, sums, 4 * (size_t)l->dim);
    }
}

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
    struct result all = {w->rows[0], sums_of(c, w, 0)}, one = {w->rows[1], sums_of(c, w, 1)};
    struct range spans = spans_of(c, item);
    attend_span(c, item, spans.from, w, all);
    for (int span = spans.from + 1; span < spans.to; span++) {
        attend_span(c, item, span, w, one);
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
    struct work *w = (struct work *)(c->work + thread * c->work_bytes);
    if (spans.from <= span && span < spans.to)
        attend_span(c, item, span, w, partial_at(c, index / c->num_spans, span));
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
    const struct batch *b = c->batch;
    int tiles = 0, longest = 0;
    for (int s = 0; s < b->sequences; s++) {
        tiles += ceil_div((b->query_starts[s + 1] - b->query_starts[s]) * c->group, MOST_ROWS);
        longest = most(longest, b->context_lens[s]);
    }
    c->num_items = tiles * c->layer->kv_heads;
    c->num_spans = ceil_div(longest, SPAN);
    struct item *items = pool_scratch(pool, SCRATCH_ITEMS, (size_t)c->num_items * sizeof *items);
    c->items = items;
    for (int kv_head = 0; kv_head < c->layer->kv_heads; kv_head++)
        for (int s = 0; s < b->sequences; s++) {
            int rows = (b->query_starts[s + 1] - b->query_starts[s]) * c->group;
            for (int row = (ceil_div(rows, MOST_ROWS) - 1) * MOST_ROWS; row >= 0; row -= MOST_ROWS)
                *items++ = (struct item){s, kv_head, row, least(MOST_ROWS, rows - row)};
        }
}

void attention_run(struct pool *pool, const struct layer *l, const struct batch *b, const float *qkv, float *out)
{
    struct call c = {.layer = l, .batch = b, .qkv = qkv, .out = out, .arithmetic = arithmetic_at(l->arithmetic)};
    c.group = l->heads / l->kv_heads;
    c.q_stride = row_bytes(c.arithmetic, l->dim);
    c.q = pool_scratch(pool, SCRATCH_ROWS, (size_t)b->tokens * l->heads * c.q_stride);
    cache_describe(&c);
    cache_write(pool, &c);

    list_items(pool, &c);
    c.work_bytes = to_line(sizeof(struct work)) + 2 * sums_bytes(&c) + to_line(cache_spare_bytes(&c, SPAN_TILES));
    c.work = pool_scratch(pool, SCRATCH_WORK, pool_threads(pool) * c.work_bytes);
    if (c.num_spans == 1 || c.num_items >= 4 * pool_threads(pool)) {
        pool_run(pool, c.num_items, attend_item, &c);
        return;
    }
    size_t partial_bytes = to_line(MOST_ROWS * sizeof(struct partial)) + sums_bytes(&c);
    c.partials = pool_scratch(pool, SCRATCH_PARTIALS, (size_t)c.num_items * c.num_spans * partial_bytes);
    pool_run(pool, c.num_items * c.num_spans, attend_part, &c);
    pool_run(pool, c.num_items, merge_parts, &c);
}
