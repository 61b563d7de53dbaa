/* y = x W^T + bias, with W in panels. Who computes which part is decided here; the arithmetic is product.c's.
 *
 * Shapes: any number of rows, W of any n and k. Limit: up to FEW_ROWS rows the reading of W, 25 to 28 GB/s with one
 * row on one core of a Zen 4, where two cores together read 28 to 34; with many rows the arithmetic, in low bits 0.28
 * TOP/s of 0.34 (docs/benchmarks.md, docs/cpu.md). bfloat16 and float32 were not measured by themselves. */
#include "linear.h"

#include "kv_prefetch.h"
#include "low_bit.h"
#include "rows.h"

#define CHUNK_BYTES (64 << 10) /* of weights: long enough to stream, short enough to share out */
/* Up to so many rows memory is all that is waited for. Its own prefetching does that best: what we fetch for the chunk
 * behind ours, another thread may have claimed. And chunks are few, so that the streams are long. */
#define FEW_ROWS 4
#define CHUNK_VALUES (4 << 10) /* of rows that one thread makes at a time */
#define MOST_RUNS 8 /* pieces that one panel's product fetches */
#define TILE_UNIT (MOST_ROWS / 3) /* rows that kernels take at a time: the heights of tiles are multiples */
#define BLOCK_TILES 8 /* row tiles that a thread carries past each panel, while the rows stay in its cache */

struct job {
    const struct linear *linear;
    const char *x; /* rows in the arithmetic's form */
    size_t x_stride;
    float *y;
    int m;
    int num_tiles; /* of nearly equal height */
    int groups; /* of MOST_PANELS panels */
    int groups_per_chunk, column_chunks;
    struct kv_prefetch *prefetch;
};

/* Pieces of a prefetch for the panels of one product to fetch. */
static void take_pieces(struct kv_prefetch *prefetch, const struct arithmetic *a, int depth, const char **ahead,
                        int *ahead_steps)
{
    int steps = (int)(prefetch->key_bytes / a->panel_step);
    if (steps * MOST_RUNS < depth) return; /* too small to be worth it */
    int runs = ceil_div(depth, steps);
    for (int i = 0; i < runs * MOST_PANELS; i++) {
        const char *piece = kv_prefetch_take(prefetch);
        ahead[i] = piece ? piece : ahead[i % MOST_PANELS];
    }
    *ahead_steps = steps;
}

static int tile_start(const struct job *job, int tile)
{
    int row = (int)((int64_t)tile * ceil_div(job->m, TILE_UNIT) / job->num_tiles) * TILE_UNIT;
    return row < job->m ? row : job->m;
}

/* Kernels take MOST_PANELS panels. Where the last group has fewer they are given one twice, and what is computed too
 * much is dropped. */
static void tile_of_columns(const struct job *job, int group, int tile)
{
    int row = tile_start(job, tile), rows = tile_start(job, tile + 1) - row;
    const struct linear *l = job->linear;
    size_t bytes = panel_bytes(l->arithmetic, l->k);
    int column = group * MOST_PANELS * PANEL, width = MOST_PANELS * PANEL;
    int depth = ceil_div(l->k, l->arithmetic->step), last_panel = (l->n - 1) / PANEL;
    kernel multiply = l->arithmetic->kernels[rows][MOST_PANELS];
    const char *panels[MOST_PANELS], *ahead[MOST_RUNS * MOST_PANELS];
    struct product t = {job->x + row * job->x_stride, job->x_stride, panels, 1, depth, depth,
                        job->y + (size_t)row * l->n + column, (size_t)l->n, l->bias ? l->bias + column : NULL,
                        ahead, depth, l->unit, rows};
    for (int p = 0; p < MOST_PANELS; p++) {
        int panel = group * MOST_PANELS + p;
        panels[p] = l->panels + (size_t)(panel < last_panel ? panel : last_panel) * bytes;
        /* The first tile fetches the next group's panels. */
        ahead[p] = panels[p] + (job->m > FEW_ROWS && !tile ? MOST_PANELS * bytes : 0);
    }
    if (tile && job->prefetch) take_pieces(job->prefetch, l->arithmetic, depth, ahead, &t.ahead_steps);
    if (column + width <= l->n) {
        multiply(&t);
        return;
    }
    float y[MOST_ROWS * MOST_PANELS * PANEL], bias[MOST_PANELS * PANEL] = {0};
    width = l->n - column;
    if (l->bias) t.bias = memcpy(bias, t.bias, 4 * (size_t)width);
    t.y = y;
    t.y_stride = MOST_PANELS * PANEL;
    multiply(&t);
    for (int r = 0; r < rows; r++)
        memcpy(job->y + (size_t)(row + r) * l->n + column, y + r * t.y_stride, 4 * (size_t)width);
}

static void linear_chunk(void *argument, int chunk, int thread)
{
    (void)thread;
    const struct job *job = argument;
    int first_tile = chunk / job->column_chunks * BLOCK_TILES;
    int end_tile = first_tile + BLOCK_TILES < job->num_tiles ? first_tile + BLOCK_TILES : job->num_tiles;
    int group = chunk % job->column_chunks * job->groups_per_chunk;
    int end_group = group + job->groups_per_chunk < job->groups ? group + job->groups_per_chunk : job->groups;
    for (; group < end_group; group++)
        for (int tile = first_tile; tile < end_tile; tile++) tile_of_columns(job, group, tile);
}

struct conversion {
    const struct linear *linear;
    const struct source *from;
    char *to;
    size_t stride;
    int m, rows_per_chunk;
    float *made; /* two rows for every thread */
};

/* A row in floats: where it is, or as it is made in `made`. */
static const float *make_row(const struct conversion *c, int row, float *made)
{
    const struct source *from = c->from;
    int k = c->linear->k;
    size_t at = (size_t)row * k;
    const float *floats = made;
    const float *halves = from->x + 2 * at;
    if (from->gated && from->limit) clamped_swiglu_row(halves, halves + k, made, k, from->alpha, from->limit);
    else if (from->gated) silu_row(halves, halves + k, made, k);
    else if (from->norm) norm_row(from->x + at, from->residual ? from->residual + at : NULL, from->norm, made, k, from->eps);
    else floats = from->x + at;
    const int32_t *order = c->linear->order;
    if (!order) return floats;
    for (int i = 0; i < k; i++) made[k + i] = floats[order[i]];
    return made + k;
}

static void convert_chunk(void *argument, int chunk, int thread)
{
    const struct conversion *c = argument;
    const struct arithmetic *a = c->linear->arithmetic;
    int k = c->linear->k, row = chunk * c->rows_per_chunk;
    int end = row + c->rows_per_chunk < c->m ? row + c->rows_per_chunk : c->m;
    for (; row < end; row++) {
        char *to = c->to + row * c->stride;
        int whole = k / a->step; /* steps */
        if (k % a->step) memset(to + (size_t)whole * a->row_step, 0, a->row_step);
        a->convert(make_row(c, row, c->made + (size_t)2 * thread * k), to, k);
    }
}

/* Rows as the kernels read them: converted where the arithmetic wants it, and never a multiple of 1 KiB apart, since
 * then a tile's rows fall into the same few sets of the first-level cache. */
static void prepare_rows(struct pool *pool, const struct linear *l, const struct source *from, int m, struct job *job)
{
    const struct arithmetic *a = l->arithmetic;
    job->x = (const char *)from->x;
    job->x_stride = (size_t)l->k * 4;
    int as_they_are = a->row_step == 4 * a->step && !from->norm && !from->gated && !l->order;
    if (as_they_are && l->k % a->step == 0 && (m == 1 || l->k % 256)) return;
    size_t stride = (row_bytes(a, l->k) + 127) / 64 * 64;
    struct conversion c = {l, from, NULL, stride + (stride % 1024 ? 0 : 64), m, 1 + CHUNK_VALUES / l->k, NULL};
    c.to = pool_scratch(pool, SCRATCH_ROWS, m * c.stride);
    c.made = pool_scratch(pool, SCRATCH_WORK, (size_t)pool_threads(pool) * 2 * l->k * sizeof(float));
    pool_run(pool, ceil_div(m, c.rows_per_chunk), convert_chunk, &c);
    job->x = c.to;
    job->x_stride = c.stride;
}

void linear_run(struct pool *pool, const struct linear *l, const struct source *from, float *y, int m)
{
    linear_run_with(pool, l, from, y, m, NULL);
}

void linear_run_with(struct pool *pool, const struct linear *l, const struct source *from, float *y, int m,
                     struct kv_prefetch *prefetch)
{
    struct job job = {.linear = l, .y = y, .m = m, .prefetch = l->arithmetic->decode ? NULL : prefetch};
    prepare_rows(pool, l, from, m, &job);
    job.num_tiles = ceil_div(m, MOST_ROWS);
    job.groups = ceil_div(l->n, MOST_PANELS * PANEL);
    size_t group_bytes = MOST_PANELS * panel_bytes(l->arithmetic, l->k);
    job.groups_per_chunk = 1 + (int)(CHUNK_BYTES / group_bytes);
    int fair = job.groups / ((m > FEW_ROWS ? 4 : 2) * pool_threads(pool)); /* leave everybody a few turns */
    if (job.groups_per_chunk > fair) job.groups_per_chunk = fair ? fair : 1;
    job.column_chunks = ceil_div(job.groups, job.groups_per_chunk);
    pool_run(pool, job.column_chunks * ceil_div(job.num_tiles, BLOCK_TILES), linear_chunk, &job);
}

struct packing {
    const struct linear *linear;
    const float *weight;
    char *stored; /* a column for every thread */
};

static void pack_panel(void *argument, int panel, int thread)
{
    const struct packing *p = argument;
    const struct linear *l = p->linear;
    const struct arithmetic *a = l->arithmetic;
    char *to = (char *)l->panels + panel * panel_bytes(a, l->k);
    int steps = ceil_div(l->k, a->step);
    char *stored = p->stored + (size_t)thread * steps * STEP_BYTES;
    memset(stored, 0, (size_t)steps * STEP_BYTES);
    for (int column = 0; column < PANEL && panel * PANEL + column < l->n; column++) {
        a->encode(p->weight + (size_t)(panel * PANEL + column) * l->k, stored, l->k);
        panel_put_column(to, column, PANEL, stored, steps);
    }
}

size_t linear_bytes(int arithmetic, int n, int k)
{
    return ceil_div(n, PANEL) * panel_bytes(arithmetic_at(arithmetic), k);
}

/* Describe a linear layer in `l` (its memory and the zeroed `panels` are the caller's) and fill the
 * panels from [n, k]. */
void linear_pack(struct pool *pool, struct linear *l, int arithmetic, char *panels, const float *weight,
                 const float *bias, int n, int k)
{
    *l = (struct linear){arithmetic_at(arithmetic), panels, bias, NULL, n, k, 1.0f};
    size_t column_bytes = (size_t)ceil_div(k, l->arithmetic->step) * STEP_BYTES;
    struct packing p = {l, weight, pool_scratch(pool, SCRATCH_WORK, pool_threads(pool) * column_bytes)};
    pool_run(pool, ceil_div(n, PANEL), pack_panel, &p);
}

struct code_packing {
    const struct linear *linear;
    const struct codes *codes;
};

static void pack_code_panel(void *argument, int panel, int thread)
{
    (void)thread;
    const struct code_packing *p = argument;
    const struct linear *l = p->linear;
    int columns = l->n - panel * PANEL < PANEL ? l->n - panel * PANEL : PANEL;
    char *to = (char *)l->panels + panel * panel_bytes(l->arithmetic, l->k);
    low_bit_pack(to, l->arithmetic, p->codes, panel * PANEL, columns, l->k);
}

/* The same from integers of 4 or 8 bits. */
void linear_pack_codes(struct pool *pool, struct linear *l, int arithmetic, char *panels, const struct codes *codes,
                       const float *bias, int n, int k)
{
    const struct arithmetic *a = arithmetic_at(arithmetic);
    *l = (struct linear){codes->precise ? a->precise : a, panels, bias, codes->order, n, k, codes->unit};
    struct code_packing p = {l, codes};
    pool_run(pool, ceil_div(n, PANEL), pack_code_panel, &p);
}

/* A linear layer whose panels were packed before. */
void linear_describe(struct linear *l, int arithmetic, int precise, const char *panels, const float *bias,
                     const int32_t *order, int n, int k, float unit)
{
    const struct arithmetic *a = arithmetic_at(arithmetic);
    *l = (struct linear){precise ? a->precise : a, panels, bias, order, n, k, unit};
}

size_t linear_struct_bytes(void) { return sizeof(struct linear); }

struct lookup {
    const struct linear *linear;
    const int32_t *ids;
    float *out;
    char *stored; /* a row for every thread */
};

static void look_up(void *argument, int row, int thread)
{
    const struct lookup *u = argument;
    const struct linear *l = u->linear;
    const struct arithmetic *a = l->arithmetic;
    int id = u->ids[row];
    const char *panel = l->panels + (size_t)(id / PANEL) * panel_bytes(a, l->k);
    float *out = u->out + (size_t)row * l->k;
    if (!a->decode) {
        low_bit_column(a, panel, id % PANEL, l->unit, out, l->k);
        return;
    }
    int steps = ceil_div(l->k, a->step);
    char *stored = u->stored + (size_t)thread * steps * STEP_BYTES;
    panel_get_column(panel, id % PANEL, PANEL, stored, steps);
    a->decode(stored, out, l->k);
}

/* Rows of W by number: the embedding, when it is the same table as the head. */
void linear_lookup(struct pool *pool, const struct linear *l, const int32_t *ids, float *out, int m)
{
    size_t stored_bytes = (size_t)ceil_div(l->k, l->arithmetic->step) * STEP_BYTES;
    struct lookup u = {l, ids, out, pool_scratch(pool, SCRATCH_WORK, pool_threads(pool) * stored_bytes)};
    pool_run(pool, m, look_up, &u);
}
