/* y += B(A(x)) for the rows of several adapters, in one call: A's products of all of them are shared out to the threads
 * at once, then B's. The products are those of linear.c, so a row's result does not depend on the rows beside it.
 *
 * Shapes: any number of rows and adapters, ranks of any size. Limit: with a few rows per adapter the reading of A and
 * B, with many the arithmetic, as in linear.c. Its share was not measured. */
#include "linear.h"

#include <string.h>

#define CHUNK_BYTES (32 << 10) /* of weights that one thread takes at a time */

/* These three are mirrored in library.py. */
struct adapter_part {
    const struct linear *b;
    int32_t rank, column; /* of what A makes, the first value that is multiplied; of y, the first that is added to */
};

struct adapter_pair {
    const struct linear *a; /* or NULL: nothing is added here */
    const struct adapter_part *parts;
    int32_t num_parts;
};

struct adapter_rows {
    const struct adapter_pair *pairs; /* of one adapter, by site */
    const int32_t *rows;
    int32_t count;
};

/* Up to MOST_ROWS rows times some panels of one linear. */
struct item {
    const struct linear *linear;
    const float *from;
    float *to;
    const int32_t *from_rows, *to_rows; /* NULL: they lie one after the other */
    int from_stride, to_stride; /* floats */
    int rows, first_panel, panels;
    int adds; /* to what is there */
};

struct work {
    struct item *items;
    char *rows; /* of every thread, in the arithmetic's form */
    size_t thread_bytes;
};

static const char *convert_rows(const struct item *it, char *to, size_t stride)
{
    const struct arithmetic *a = it->linear->arithmetic;
    int k = it->linear->k, whole = k / a->step;
    for (int r = 0; r < it->rows; r++) {
        char *row = to + r * stride;
        if (k % a->step) memset(row + (size_t)whole * a->row_step, 0, a->row_step);
        a->convert(it->from + (size_t)(it->from_rows ? it->from_rows[r] : r) * it->from_stride, row, k);
    }
    return to;
}

static size_t row_stride(const struct linear *l) { return (row_bytes(l->arithmetic, l->k) + 127) / 64 * 64; }

static void run_item(void *argument, int chunk, int thread)
{
    const struct work *w = argument;
    const struct item *it = w->items + chunk;
    const struct linear *l = it->linear;
    size_t stride = row_stride(l), bytes = panel_bytes(l->arithmetic, l->k);
    const char *x = convert_rows(it, w->rows + thread * w->thread_bytes, stride);
    int depth = ceil_div(l->k, l->arithmetic->step);
    for (int panel = it->first_panel; panel < it->first_panel + it->panels; panel += MOST_PANELS) {
        int left = it->first_panel + it->panels - panel, count = left < MOST_PANELS ? left : MOST_PANELS;
        const char *panels[MOST_PANELS];
        float y[MOST_ROWS * MOST_PANELS * PANEL];
        struct product t = {x, stride, panels, 1, depth, depth, y, MOST_PANELS * PANEL, NULL,
                            panels, depth, l->unit, it->rows};
        for (int p = 0; p < count; p++) panels[p] = l->panels + (size_t)(panel + p) * bytes;
        l->arithmetic->kernels[it->rows][count](&t);
        int column = panel * PANEL, width = l->n - column < count * PANEL ? l->n - column : count * PANEL;
        for (int r = 0; r < it->rows; r++) {
            float *to = it->to + (size_t)(it->to_rows ? it->to_rows[r] : r) * it->to_stride + column;
            const float *found = y + r * MOST_PANELS * PANEL;
            if (!it->adds) memcpy(to, found, 4 * (size_t)width);
            else
                for (int c = 0; c < width; c++) to[c] += found[c];
        }
    }
}

/* The items of one linear over one adapter's rows, behind `at`; with `at` NULL they are only counted. */
static int cut(struct item *at, struct item whole, int rows)
{
    int num_panels = ceil_div(whole.linear->n, PANEL), num_items = 0;
    int most = (int)(CHUNK_BYTES / panel_bytes(whole.linear->arithmetic, whole.linear->k));
    int each = ceil_div(most < 1 ? 1 : most, MOST_PANELS) * MOST_PANELS;
    for (int row = 0; row < rows; row += MOST_ROWS)
        for (int panel = 0; panel < num_panels; panel += each, num_items++) {
            if (!at) continue;
            struct item it = whole;
            it.rows = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            if (it.from_rows) it.from_rows += row;
            else it.from += (size_t)row * it.from_stride;
            if (it.to_rows) it.to_rows += row;
            else it.to += (size_t)row * it.to_stride;
            it.first_panel = panel;
            it.panels = num_panels - panel < each ? num_panels - panel : each;
            at[num_items] = it;
        }
    return num_items;
}

/* All items of the first products, or of the second ones. `hidden` is [rows of all adapters, width]. */
static int lay_out(struct item *at, const struct adapter_rows *groups, int num_groups, int site, int second,
                   const float *x, int k, float *hidden, int width, float *y, int n)
{
    int count = 0;
    for (const struct adapter_rows *g = groups; g < groups + num_groups; hidden += (size_t)g->count * width, g++) {
        const struct adapter_pair *pair = g->pairs + site;
        if (!pair->a) continue;
        struct item first = {pair->a, x, hidden, g->rows, NULL, k, width, 0, 0, 0, 0};
        if (!second) count += cut(at ? at + count : NULL, first, g->count);
        for (const struct adapter_part *p = pair->parts; second && p < pair->parts + pair->num_parts; p++) {
            struct item it = {p->b, hidden + p->rank, y + p->column, NULL, g->rows, width, n, 0, 0, 0, 1};
            count += cut(at ? at + count : NULL, it, g->count);
        }
    }
    return count;
}

/* x is [tokens, k] and y [tokens, n]; `site`: which of the adapters' pairs. No two of the groups have a row in common. */
void adapters_run(struct pool *pool, const struct adapter_rows *groups, int num_groups, int site, const float *x, int k,
                  float *y, int n)
{
    int width = 0, rows = 0;
    size_t longest = 0;
    for (const struct adapter_rows *g = groups; g < groups + num_groups; g++) {
        const struct adapter_pair *pair = g->pairs + site;
        rows += g->count;
        if (!pair->a) continue;
        if (pair->a->n > width) width = pair->a->n;
        if (row_stride(pair->a) > longest) longest = row_stride(pair->a);
        for (int p = 0; p < pair->num_parts; p++)
            if (row_stride(pair->parts[p].b) > longest) longest = row_stride(pair->parts[p].b);
    }
    if (!width) return;
    float *hidden = pool_scratch(pool, SCRATCH_WORK, (size_t)rows * width * sizeof(float));
    struct work w = {.thread_bytes = MOST_ROWS * longest};
    w.rows = pool_scratch(pool, SCRATCH_ROWS, pool_threads(pool) * w.thread_bytes);
    for (int second = 0; second < 2; second++) {
        int count = lay_out(NULL, groups, num_groups, site, second, x, k, hidden, width, y, n);
        w.items = pool_scratch(pool, SCRATCH_ITEMS, count * sizeof(struct item));
        lay_out(w.items, groups, num_groups, site, second, x, k, hidden, width, y, n);
        pool_run(pool, count, run_item, &w);
    }
}
