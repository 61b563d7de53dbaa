/* Causal attention over a cache of blocks: any mix of prefill chunks and single tokens in one call.
 *
 * Shapes: head sizes of multiples of 8 up to 576, any context, any number of queries per KV head. Limit: decodes read
 * KV, 9 GB/s from the scattered blocks of 32 sequences on one core of a Zen 4, where streams of weights reach 25 to
 * 28; prompts compute, at 512 tokens most of all the softmax, whose share was not measured (docs/benchmarks.md).
 *
 * First every token's q and k are normed and rotated, and k and v written into the cache; then the queries of each
 * sequence and KV head are cut in tiles of rows (a row is one query of one head), and each tile attends.
 *
 * A row's context is cut in spans at fixed absolute positions. A span is attended alone, with its own maximum, and the
 * spans are merged in order. So a row's result depends on its keys and its position only: not on the chunk it came in,
 * not on the rows beside it, of its own sequence or of others that share the span, nor on whether its spans were computed
 * by one thread or by several.
 *
 * Where ranks share out the tokens of a sequence, positions of a context are places among those that are kept here, and
 * what is found is merged over the ranks by log-sum-exp. */
#include "attention.h"
#include "ranks.h"
#include "sharing.h"
#include "span.h"

#include <math.h>

#define MOST_ITEMS_PER_CHUNK 6 /* what one thread claims at once: it knows then what it will read next */

struct item { /* a tile of rows: row / group is a query of the sequence, row % group a head of the KV head */
    int sequence, kv_head, row, rows;
};

struct shared_item { /* row / group is a token of the shared span */
    const struct shared_span *span;
    int kv_head, row, rows;
};

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }

/* -- rows --------------------------------------------------------------------------------------------------------- */

static char *q_row(const struct call *c, int kv_head, int token)
{
    return c->q + ((size_t)kv_head * c->batch->tokens + token) * c->group * c->q_stride;
}

/* The first position that a token sees. */
static int oldest_of(int position, int window)
{
    if (window < 0) return position / -window * -window;
    return window ? most(0, position - window + 1) : 0;
}

static struct range seen_by(const struct call *c, const struct item *item, int row)
{
    int s = item->sequence, queries = c->batch->query_starts[s + 1] - c->batch->query_starts[s];
    int position = c->batch->context_lens[s] - queries + row / c->group;
    return (struct range){kept(c->layer, oldest_of(position, c->layer->window)), kept(c->layer, position + 1)};
}

static struct rows rows_of(const struct call *c, const struct item *item)
{
    struct rows rows = {q_row(c, item->kv_head, c->batch->query_starts[item->sequence]) + item->row * c->q_stride,
                        item->rows, item->kv_head, item->sequence};
    for (int r = 0; r < item->rows; r++) rows.seen[r] = seen_by(c, item, item->row + r);
    return rows;
}

static struct range spans_of(const struct rows *rows)
{
    return (struct range){rows->seen[0].from / SPAN, ceil_div(rows->seen[rows->count - 1].to, SPAN)};
}

/* -- spans that are shared ----------------------------------------------------------------------------------------- */

static struct result shared_result(const struct call *c, int kv_head, int row)
{
    int rows = c->sharing->num_tokens * c->group;
    struct result all = result_at(c->shared_partials + kv_head * result_bytes(c, rows), rows);
    return (struct result){all.rows + row, all.sums + (size_t)row * c->value_panels * PANEL};
}

static void attend_shared_item(const struct call *c, const struct shared_item *item, int next_tiles, struct work *w)
{
    const struct shared_span *shared = item->span;
    struct rows rows = {w->rows, item->rows, item->kv_head, shared->sequence};
    for (int r = 0; r < item->rows; r++) {
        int row = item->row + r, token = c->sharing->tokens[shared->first + row / c->group];
        memcpy(w->rows + r * c->q_stride, q_row(c, item->kv_head, token) + row % c->group * c->q_stride, c->q_stride);
        rows.seen[r] = (struct range){0, (shared->span + 1) * SPAN};
    }
    struct result result = shared_result(c, item->kv_head, shared->first * c->group + item->row);
    attend_span(c, &rows, shared->span, w, next_tiles, result);
}

static void attend_shared(void *argument, int chunk, int thread)
{
    const struct call *c = argument;
    struct work *w = work_of(c, thread);
    int per_chunk = c->shared_per_chunk, end = least((chunk + 1) * per_chunk, c->num_shared_items);
    for (int i = chunk * per_chunk; i < end; i++) {
        const struct shared_item *item = c->shared_items + i;
        int next = i + 1 < end ? i + 1 : i + 1 + (c->threads - 1) * per_chunk, tiles = 0; /* when all take turns */
        if (next < c->num_shared_items) {
            const struct shared_item *then = c->shared_items + next;
            struct rows rows = {NULL, 1, then->kv_head, then->span->sequence, {{0, (then->span->span + 1) * SPAN}}};
            if (then->span != item->span || then->kv_head != item->kv_head)
                tiles = span_fetch(c, &rows, then->span->span, w);
        }
        attend_shared_item(c, item, tiles, w);
    }
}

/* Tiles that read the same keys lie together: one thread has them all, if there are enough for everybody. */
static void run_shared(struct pool *pool, struct call *c)
{
    const struct sharing *sharing = c->sharing;
    int num_items = 0, widest = 1, kv_heads = c->layer->kv_heads;
    for (int i = 0; i < sharing->count; i++) {
        int tiles = ceil_div(sharing->spans[i].count * c->group, MOST_ROWS);
        num_items += kv_heads * tiles;
        widest = most(widest, tiles);
    }
    struct shared_item *items = pool_scratch(pool, SCRATCH_SHARED_ITEMS, (size_t)num_items * sizeof *items);
    c->shared_items = items;
    c->num_shared_items = num_items;
    c->threads = pool_threads(pool);
    c->shared_per_chunk = kv_heads * sharing->count >= 4 * c->threads ? widest : 1;
    for (int i = 0; i < sharing->count; i++)
        for (int kv_head = 0; kv_head < kv_heads; kv_head++) {
            int rows = sharing->spans[i].count * c->group, tiles = ceil_div(rows, MOST_ROWS);
            for (int t = 0; t < tiles; t++) {
                int row = t * rows / tiles;
                *items++ = (struct shared_item){sharing->spans + i, kv_head, row, (t + 1) * rows / tiles - row};
            }
        }
    size_t bytes = kv_heads * result_bytes(c, sharing->num_tokens * c->group);
    c->shared_partials = pool_scratch(pool, SCRATCH_SHARED_PARTIALS, bytes);
    pool_run(pool, ceil_div(num_items, c->shared_per_chunk), attend_shared, c);
}

static int is_shared(const struct call *c, const struct rows *rows, int span)
{
    return shared_place(c->sharing, rows->sequence, span) >= 0;
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

static void merge(const struct call *c, int rows, struct result into, struct result from)
{
    int n = c->value_panels * PANEL;
    for (int r = 0; r < rows; r++) merge_row(into.rows + r, into.sums + r * n, from.rows + r, from.sums + r * n, n);
}

static void merge_shared(const struct call *c, const struct item *item, int span, struct result into)
{
    int row = shared_place(c->sharing, item->sequence, span) * c->group + item->row;
    merge(c, item->rows, into, shared_result(c, item->kv_head, row));
}

/* A sink is one score more, and has no value: the sums stay, and what they are divided by grows. */
static void add_sink(struct partial *row, float *sums, float sink, int n)
{
    if (sink > row->max) {
        float keep = row->max == -INFINITY ? 0.0f : expf(row->max - sink);
        for (int i = 0; i < n; i++) sums[i] = keep ? sums[i] * keep : 0.0f;
        row->sum = keep ? row->sum * keep : 0.0f;
        row->max = sink;
    }
    row->sum += expf(sink - row->max);
}

static void write_result(const struct call *c, const struct item *item, struct result result)
{
    const struct layer *l = c->layer;
    int n = c->value_panels * PANEL, dim = value_dim(l);
    for (int r = 0; r < item->rows; r++) {
        int row = item->row + r, token = c->batch->query_starts[item->sequence] + row / c->group;
        int head = item->kv_head * c->group + row % c->group;
        float *sums = result.sums + r * n;
        if (l->sinks) add_sink(result.rows + r, sums, l->sinks[head], n);
        float max = result.rows[r].max, scale = 1.0f / result.rows[r].sum;
        float *out = c->out + ((size_t)(head / l->heads) * c->batch->tokens + token) * c->out_width;
        head %= l->heads;
        if (c->writes_lse) out[l->heads * dim + head] = max == -INFINITY ? max : max + logf(result.rows[r].sum);
        if (max == -INFINITY) { /* it sees none of the tokens that are kept here */
            memset(out + head * dim, 0, 4 * (size_t)dim);
            continue;
        }
        for (int d = 0; d < n; d += VL) store(sums + d, load(sums + d) * scale);
        memcpy(out + head * dim, sums, 4 * (size_t)dim);
    }
}

/* -- a thread goes through whole items ------------------------------------------------------------------------------ */

/* Of the span behind `span`, or of the next item's first. */
static int fetch_next(const struct call *c, const struct rows *rows, int span, int next_item, int end, struct work *w)
{
    struct range spans = spans_of(rows);
    if (span + 1 < spans.to) return is_shared(c, rows, span + 1) ? 0 : span_fetch(c, rows, span + 1, w);
    if (next_item == end) return 0;
    struct rows next = rows_of(c, c->items + next_item);
    spans = spans_of(&next);
    while (is_shared(c, &next, spans.from)) spans.from++; /* the last is nobody else's */
    return span_fetch(c, &next, spans.from, w);
}

static void attend_items(void *argument, int chunk, int thread)
{
    const struct call *c = argument;
    struct work *w = work_of(c, thread);
    struct result all = w->results[0], one = w->results[1];
    int end = least((chunk + 1) * c->items_per_chunk, c->num_items);
    for (int i = chunk * c->items_per_chunk; i < end; i++) {
        const struct item *item = c->items + i;
        struct rows rows = rows_of(c, item);
        struct range spans = spans_of(&rows);
        for (int r = 0; r < item->rows; r++) all.rows[r].max = -INFINITY;
        for (int span = spans.from; span < spans.to; span++) {
            if (is_shared(c, &rows, span)) {
                merge_shared(c, item, span, all);
                continue;
            }
            int tiles = fetch_next(c, &rows, span, i + 1, end, w);
            attend_span(c, &rows, span, w, tiles, span == spans.from ? all : one);
            if (span > spans.from) merge(c, item->rows, all, one);
        }
        write_result(c, item, all);
    }
}

/* -- the spans of an item go to several threads ---------------------------------------------------------------------- */

static struct result partial_at(const struct call *c, int item, int span)
{
    return result_at(c->partials + ((size_t)item * c->num_spans + span) * result_bytes(c, MOST_ROWS), MOST_ROWS);
}

static void attend_part(void *argument, int index, int thread)
{
    const struct call *c = argument;
    struct rows rows = rows_of(c, c->items + index / c->num_spans);
    struct range spans = spans_of(&rows);
    int span = index % c->num_spans;
    if (spans.from <= span && span < spans.to && !is_shared(c, &rows, span))
        attend_span(c, &rows, span, work_of(c, thread), 0, partial_at(c, index / c->num_spans, span));
}

static void merge_parts(void *argument, int index, int thread)
{
    const struct call *c = argument;
    const struct item *item = c->items + index;
    struct rows rows = rows_of(c, item);
    struct range spans = spans_of(&rows);
    struct result all = work_of(c, thread)->results[0];
    for (int r = 0; r < item->rows; r++) all.rows[r].max = -INFINITY;
    for (int span = spans.from; span < spans.to; span++)
        if (is_shared(c, &rows, span)) merge_shared(c, item, span, all);
        else merge(c, item->rows, all, partial_at(c, index, span));
    write_result(c, item, all);
}

/* Sequence by sequence, whose blocks hold all KV heads side by side; long contexts first. */
static void list_items(struct pool *pool, struct call *c)
{
    const struct batch *b = c->batch;
    int tiles = 0, longest = 0;
    for (int s = 0; s < b->sequences; s++) {
        tiles += ceil_div((b->query_starts[s + 1] - b->query_starts[s]) * c->group, MOST_ROWS);
        longest = most(longest, kept(c->layer, b->context_lens[s]));
    }
    c->num_items = tiles * c->layer->kv_heads;
    c->num_spans = most(1, ceil_div(longest, SPAN));
    c->items_per_chunk = least(most(c->num_items / (4 * pool_threads(pool)), 1), MOST_ITEMS_PER_CHUNK);
    struct item *items = pool_scratch(pool, SCRATCH_ITEMS, (size_t)c->num_items * sizeof *items);
    c->items = items;
    for (int s = 0; s < b->sequences; s++)
        for (int kv_head = 0; kv_head < c->layer->kv_heads; kv_head++) {
            int rows = (b->query_starts[s + 1] - b->query_starts[s]) * c->group;
            for (int row = (ceil_div(rows, MOST_ROWS) - 1) * MOST_ROWS; row >= 0; row -= MOST_ROWS)
                *items++ = (struct item){s, kv_head, row, least(MOST_ROWS, rows - row)};
        }
}

struct sharing attention_sharing(struct pool *pool, const struct layer *l, const struct batch *b)
{
    int group = l->heads * l->ranks / l->kv_heads; /* who fills a tile alone gains nothing */
    return sharing_find(pool, b, l, (MOST_ROWS - 1) / group);
}

static void run(struct pool *pool, struct call *c)
{
    static const struct sharing nothing;
    const struct layer *l = c->layer;
    c->arithmetic = arithmetic_at(l->arithmetic);
    c->group = c->heads / l->kv_heads;
    if (l->window) c->sharing = &nothing; /* a window has another beginning for each */
    c->q_stride = row_bytes(c->arithmetic, l->dim);
    c->q = pool_scratch(pool, SCRATCH_ROWS, (size_t)c->batch->tokens * c->heads * c->q_stride);
    cache_describe(c);
    cache_write(pool, c);

    list_items(pool, c);
    c->work_bytes = work_bytes(c);
    c->work = pool_scratch(pool, SCRATCH_WORK, pool_threads(pool) * c->work_bytes);
    if (c->sharing->count) run_shared(pool, c);
    if (c->num_spans == 1 || c->num_items >= 4 * pool_threads(pool)) {
        pool_run(pool, ceil_div(c->num_items, c->items_per_chunk), attend_items, c);
        return;
    }
    c->partials = pool_scratch(pool, SCRATCH_PARTIALS, (size_t)c->num_items * c->num_spans * result_bytes(c, MOST_ROWS));
    pool_run(pool, c->num_items * c->num_spans, attend_part, c);
    pool_run(pool, c->num_items, merge_parts, c);
}

/* -- tokens that are shared out among ranks ------------------------------------------------------------------------- */

static int part_width(const struct layer *l) { return l->heads * (l->dim + 1); }

/* `queries` [tokens, ranks * heads * dim] of all ranks of the group, which `qkv` has not; `parts` [ranks][tokens] rows of
 * heads * dim outputs and heads log-sum-exps. */
static void run_part(struct pool *pool, const struct layer *l, const struct batch *b, const struct sharing *sharing,
                     const float *queries, const float *qkv, float *parts)
{
    size_t own = (size_t)l->heads * l->dim, all = l->ranks * own, width = own + 2 * (size_t)l->kv_heads * l->dim;
    struct call c = {.layer = l, .batch = b, .heads = l->heads * l->ranks, .queries = queries, .query_stride = all,
                     .kv = qkv + own, .kv_stride = width, .out = parts, .out_width = part_width(l), .writes_lse = 1,
                     .sharing = sharing};
    run(pool, &c);
}

struct merging {
    const struct layer *layer;
    const float *parts;
    float *out;
    int tokens;
};

/* One token's heads, in the order of ranks: all that take part have seen the same query. */
static void merge_token(void *argument, int token, int thread)
{
    (void)thread;
    const struct merging *m = argument;
    const struct layer *l = m->layer;
    int width = part_width(l);
    for (int head = 0; head < l->heads; head++) {
        float *out = m->out + ((size_t)token * l->heads + head) * l->dim, max = -INFINITY, total = 0.0f;
        for (int rank = 0; rank < l->ranks; rank++) {
            float lse = m->parts[((size_t)rank * m->tokens + token) * width + l->heads * l->dim + head];
            max = lse > max ? lse : max;
        }
        memset(out, 0, 4 * (size_t)l->dim);
        for (int rank = 0; rank < l->ranks; rank++) {
            const float *row = m->parts + ((size_t)rank * m->tokens + token) * width, *part = row + head * l->dim;
            float lse = row[l->heads * l->dim + head], weight = lse == -INFINITY ? 0.0f : expf(lse - max);
            for (int d = 0; d < l->dim; d++) out[d] += part[d] * weight;
            total += weight;
        }
        for (int d = 0; d < l->dim; d++) out[d] /= total;
    }
}

void attention_merge(struct pool *pool, const struct layer *l, const float *parts, float *out, int tokens)
{
    struct merging merging = {l, parts, out, tokens};
    pool_run(pool, tokens, merge_token, &merging);
}

void attention_part(struct pool *pool, const struct layer *l, const struct batch *b, const float *queries,
                    const float *qkv, float *parts)
{
    struct sharing sharing = attention_sharing(pool, l, b);
    run_part(pool, l, b, &sharing, queries, qkv, parts);
}

/* Queries of all ranks of the group, attention over the tokens that are kept here, what all found for this rank's heads. */
static int run_among(struct pool *pool, struct ranks *ranks, const struct layer *l, const struct batch *b,
                     const struct sharing *sharing, const float *qkv, float *out)
{
    size_t m = (size_t)b->tokens, own = (size_t)l->heads * l->dim, width = own + 2 * (size_t)l->kv_heads * l->dim;
    size_t parts_size = l->ranks * m * part_width(l);
    float *queries = pool_scratch(pool, SCRATCH_GROUP, (m * l->ranks * own + 2 * parts_size) * sizeof(float));
    float *parts = queries + m * l->ranks * own, *found = parts + parts_size;
    if (ranks_gather(ranks, qkv, queries, m, own, width, l->ranks)) return ranks->lost;
    run_part(pool, l, b, sharing, queries, qkv, parts);
    if (ranks_exchange(ranks, parts, found, m, part_width(l), l->ranks)) return ranks->lost;
    attention_merge(pool, l, found, out, b->tokens);
    return 0;
}

int attention_run_shared(struct pool *pool, struct ranks *ranks, const struct layer *l, const struct batch *b,
                         const struct sharing *sharing, const float *qkv, float *out)
{
    if (l->ranks > 1) return run_among(pool, ranks, l, b, sharing, qkv, out);
    size_t own = (size_t)l->heads * l->dim, width = own + (l->value_dim ? 1 : 2) * (size_t)l->kv_heads * l->dim;
    struct call c = {.layer = l, .batch = b, .heads = l->heads, .queries = qkv, .query_stride = width, .kv = qkv + own,
                     .kv_stride = width, .out = out, .out_width = l->heads * value_dim(l), .sharing = sharing};
    run(pool, &c);
    return 0;
}

int attention_run(struct pool *pool, struct ranks *ranks, const struct layer *l, const struct batch *b, const float *qkv,
                  float *out)
{
    struct sharing sharing = attention_sharing(pool, l, b);
    return attention_run_shared(pool, ranks, l, b, &sharing, qkv, out);
}
