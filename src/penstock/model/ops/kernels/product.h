/* The one matrix product everything is made of: a few rows times a few panels.
 *
 * Shapes: 1 to MOST_ROWS rows by 1 to MOST_PANELS panels, k of any length and in several pieces. product.c has the
 * limit.
 *
 * A panel is 16 columns of a matrix, k-major, as [k / step][16][step] values: `step` values of k lie together because
 * the instruction that consumes them wants it so. Weights, keys (columns: positions, k: dimensions) and values
 * (columns: dimensions, k: positions) are all stored as panels, so linear layers and attention share these kernels.
 *
 * An output element is one chain of multiply-adds in the order of k, starting from zero, in every variant of one
 * arithmetic. So a row's result does not depend on how many rows or panels were computed with it: batch invariance. */
#pragma once

#include "vector.h"

#if VL == 16
#define MOST_ROWS 12
#define MOST_PANELS 2
#elif defined(__aarch64__) || VL == 8
#define MOST_ROWS 6
#define MOST_PANELS 1
#else
#define MOST_ROWS 3
#define MOST_PANELS 1
#endif

struct product {
    const void *x; /* rows, in the arithmetic's form */
    size_t x_stride; /* bytes */
    const char *const *panels; /* [segments][panels]: k may run through several places in memory, like KV blocks */
    int segments;
    int depth; /* steps of k in every segment … */
    int last_depth; /* … but the last */
    float *y;
    size_t y_stride; /* floats */
    const float *bias; /* of these columns, or NULL */
    const char *const *ahead; /* [segments][panels]: fetched into the second-level cache meanwhile, as wanted next */
    int ahead_steps; /* low-bit panels are one segment, and have [runs][panels] of so many steps each */
    float unit; /* of the scales that low-bit panels hold */
    int rows; /* by which the kernel was chosen */
};

typedef void (*kernel)(const struct product *);

/* One row per way to store weights and compute with them. A step of one column is four bytes where values are floats;
 * low-bit panels (low_bit.h) have no such form, and hold no keys or values. */
struct arithmetic {
    int step; /* values of k that lie together in a panel */
    int panel_step, row_step; /* bytes of one step: of a panel, and of a row that kernels read */
    void (*convert)(const float *from, void *to, int count); /* a row to the kernels' form */
    void (*encode)(const float *from, void *to, int count); /* values to their stored form, and back; or NULL */
    void (*decode)(const void *from, float *to, int count);
    kernel kernels[MOST_ROWS + 1][MOST_PANELS + 1]; /* low-bit: MOST_PANELS alone */
    int row_head; /* bytes of a row before its first step */
    const struct arithmetic *precise; /* low-bit: of the same panels, and rows that are rounded less; or NULL */
    int has_scales; /* of a cache: what encode leaves has a bfloat16 scale behind its values (cached_int8.h) */
};

#define STEP_BYTES 4

/* In the order of `ARITHMETICS`, `LOW_BIT` and `CACHED_INT8` in library.py; NULL where this machine has no such instruction. */
const struct arithmetic *arithmetic_at(int index);

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

INLINE size_t panel_bytes(const struct arithmetic *a, int k) { return (size_t)ceil_div(k, a->step) * a->panel_step; }

INLINE size_t row_bytes(const struct arithmetic *a, int k)
{
    return a->row_head + (size_t)ceil_div(k, a->step) * a->row_step;
}

/* One column of a panel from or to its stored values; `columns` is 16 but for KV blocks of odd sizes. */
INLINE void panel_put_column(char *panel, int column, int columns, const char *stored, int steps)
{
    for (int s = 0; s < steps; s++)
        memcpy(panel + ((size_t)s * columns + column) * STEP_BYTES, stored + s * STEP_BYTES, STEP_BYTES);
}

INLINE void panel_get_column(const char *panel, int column, int columns, char *stored, int steps)
{
    for (int s = 0; s < steps; s++)
        memcpy(stored + s * STEP_BYTES, panel + ((size_t)s * columns + column) * STEP_BYTES, STEP_BYTES);
}

/* The 16 values of one k, likewise. */
INLINE void panel_put_row(const struct arithmetic *a, char *panel, int k, const char *stored)
{
    size_t value = STEP_BYTES / a->step;
    char *to = panel + (size_t)(k / a->step) * PANEL * STEP_BYTES + k % a->step * value;
    for (int column = 0; column < PANEL; column++)
        if (value == 1) to[column * STEP_BYTES] = stored[column];
        else if (value == 2) memcpy(to + column * STEP_BYTES, stored + column * 2, 2);
        else memcpy(to + column * STEP_BYTES, stored + column * 4, 4);
}

INLINE void panel_get_row(const struct arithmetic *a, const char *panel, int k, char *stored)
{
    size_t value = STEP_BYTES / a->step;
    const char *from = panel + (size_t)(k / a->step) * PANEL * STEP_BYTES + k % a->step * value;
    for (int column = 0; column < PANEL; column++) memcpy(stored + column * value, from + column * STEP_BYTES, value);
}
