/* The span of span.h: scores, their softmax, the values' sums.
 *
 * Shapes: 1 to MOST_ROWS rows by 256 positions, head sizes as in attention.c. Limit: with a few rows the reading of
 * KV, with a full tile the products and the softmax between them. attention.c has the figures. */
#include "span.h"

#include "rows.h"

#include <math.h>

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }

static size_t to_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t result_bytes(const struct call *c, int rows)
{
    return to_line(rows * sizeof(struct partial)) + rows * 4 * (size_t)c->value_panels * PANEL;
}

struct result result_at(char *at, int rows)
{
    return (struct result){(struct partial *)at, (float *)(at + to_line(rows * sizeof(struct partial)))};
}

size_t work_bytes(const struct call *c)
{
    return to_line(sizeof(struct work)) + 2 * result_bytes(c, MOST_ROWS) + to_line(MOST_ROWS * c->q_stride) +
           to_line(cache_spare_bytes(c, SPAN_TILES));
}

struct work *work_of(const struct call *c, int thread)
{
    struct work *w = (struct work *)(c->work + thread * c->work_bytes);
    char *behind = (char *)w + to_line(sizeof *w);
    for (int i = 0; i < 2; i++, behind += result_bytes(c, MOST_ROWS)) w->results[i] = result_at(behind, MOST_ROWS);
    w->rows = behind;
    w->spare = behind + to_line(MOST_ROWS * c->q_stride);
    return w;
}

/* What any of the rows sees of a span, from the beginning of a tile. */
static struct range part_of(const struct rows *rows, int span)
{
    int from = rows->seen[0].from, to = 0;
    for (int r = 0; r < rows->count; r++) {
        from = least(from, rows->seen[r].from);
        to = most(to, rows->seen[r].to);
    }
    return (struct range){most(span * SPAN, from / PANEL * PANEL), least((span + 1) * SPAN, to)};
}

static void score(const struct call *c, const struct rows *rows, int tiles, struct work *w)
{
    int depth = c->layer->dim / c->arithmetic->step;
    for (int t = 0; t < tiles; t += MOST_PANELS) {
        struct product p = {rows->q, c->q_stride, w->keys + t, 1, depth, depth, w->scores + t * PANEL, SCORE_STRIDE,
                            NULL, w->values + t /* wanted next */, 0, 1.0f, rows->count};
        c->arithmetic->kernels[rows->count][least(MOST_PANELS, tiles - t)](&p);
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
static void weigh_rows(const struct call *c, const struct rows *rows, int first, int count, struct work *w,
                       struct partial *partials)
{
    int has_scales = c->arithmetic->has_scales;
    for (int r = 0; r < rows->count; r++) {
        struct range seen = rows->seen[r];
        if (has_scales) multiply(w->scores + r * SCORE_STRIDE, w->key_scales, count);
        if (c->layer->cap > 0) cap_row(w->scores + r * SCORE_STRIDE, count, c->layer->cap);
        int from = least(most(seen.from - first, 0), count), to = most(least(seen.to - first, count), from);
        partials[r].max = mask(w->scores + r * SCORE_STRIDE, from, to, count);
    }
    for (int r = 0; r < rows->count; r++) {
        float *scores = w->scores + r * SCORE_STRIDE;
        if (partials[r].max == -INFINITY) memset(scores, 0, 4 * (size_t)count); /* sees nothing of this span */
        else partials[r].sum = weigh(scores, partials[r].max, count);
        if (has_scales) multiply(scores, w->value_scales, count);
        c->arithmetic->convert(scores, (char *)w->weights + r * row_bytes(c->arithmetic, SCORE_STRIDE), count);
    }
}

/* The values' panels, and what is fetched while they are read: as much of the next tile's keys as there is of each of
 * these tiles' values. */
static void sum_values(const struct call *c, int rows, int tiles, int last_depth, size_t panel_stride, int next_tiles,
                       struct work *w, float *sums)
{
    const struct arithmetic *f = c->arithmetic;
    size_t fetched = panel_bytes(f, PANEL);
    for (int v = 0; v < c->value_panels; v += MOST_PANELS) {
        int panels = least(MOST_PANELS, c->value_panels - v);
        for (int t = 0; t < tiles; t++)
            for (int p = 0; p < panels; p++) {
                const char *panel = w->panels[t * panels + p] = w->values[t] + (v + p) * panel_stride;
                w->ahead[t * panels + p] = t < next_tiles ? w->next[t] + (v + p) * fetched : panel;
            }
        struct product product = {w->weights, row_bytes(f, SCORE_STRIDE), w->panels, tiles, PANEL / f->step, last_depth,
                                  sums + v * PANEL, (size_t)c->value_panels * PANEL, NULL, w->ahead, 0, 1.0f,
                                  rows};
        f->kernels[rows][panels](&product);
    }
}

void attend_span(const struct call *c, const struct rows *rows, int span, struct work *w, int next_tiles,
                 struct result result)
{
    struct range part = part_of(rows, span);
    for (int r = 0; r < rows->count; r++) result.rows[r] = (struct partial){-INFINITY, 0.0f};
    if (part.from >= part.to) return;
    int count = part.to - part.from, tiles = ceil_div(count, PANEL);
    size_t panel_stride =
        cache_tiles(c, rows->sequence, rows->kv_head, part.from, part.to, w->keys, w->values, w->spare);
    score(c, rows, tiles, w);
    if (c->arithmetic->has_scales) read_scales(c, count, w);
    weigh_rows(c, rows, part.from, tiles * PANEL, w, result.rows);
    int last_depth = ceil_div(count - (tiles - 1) * PANEL, c->arithmetic->step);
    sum_values(c, rows->count, tiles, last_depth, panel_stride, next_tiles, w, result.sums);
}

int span_fetch(const struct call *c, const struct rows *rows, int span, struct work *w)
{
    struct range part = part_of(rows, span);
    if (part.from >= part.to || c->key_columns != PANEL || c->layer->value_dim) return 0;
    cache_tiles(c, rows->sequence, rows->kv_head, part.from, part.to, w->next, w->values, w->spare);
    return ceil_div(part.to - part.from, PANEL);
}
