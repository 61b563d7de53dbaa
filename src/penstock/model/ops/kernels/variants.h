/* What the texts of kernels share: rows and panels are constants there, and a kernel is compiled for every number.
 *
 * Shapes: every number of rows up to MOST_ROWS, every number of panels up to MOST_PANELS. Macros alone: product.c and
 * low_bit_kernels.h have the limits. */
#pragma once

#include "product.h"

#define UNROLL _Pragma("GCC unroll 16")

/* Rows in threes, so that two registers address each three: base, base + stride, base + 2 * stride. */
#define ROW_GROUPS ((MOST_ROWS + 2) / 3)
#define ROW(type, r) ((const type *)(base[(r) / 3] + (r) % 3 * t->x_stride))
#define FOR_ROWS UNROLL for (int r = 0; r < rows; r++)
#define FOR_ROW_GROUPS UNROLL for (int g = 0; g < (rows + 2) / 3; g++)

#define VARIANT(name, rows, panels) \
    static void name##_##rows##_##panels(const struct product *t) { product_##name(t, rows, panels); }

#if VL == 16
#define FOR_PANELS(X, name, rows) X(name, rows, 1) X(name, rows, 2)
#else
#define FOR_PANELS(X, name, rows) X(name, rows, 1)
#endif

#define FOR_3(X, name) FOR_PANELS(X, name, 1) FOR_PANELS(X, name, 2) FOR_PANELS(X, name, 3)
#if MOST_ROWS >= 6
#define FOR_6(X, name) FOR_3(X, name) FOR_PANELS(X, name, 4) FOR_PANELS(X, name, 5) FOR_PANELS(X, name, 6)
#else
#define FOR_6(X, name) FOR_3(X, name)
#endif
#if MOST_ROWS >= 12
#define FOR_VARIANTS(X, name)                                                                             \
    FOR_6(X, name) FOR_PANELS(X, name, 7) FOR_PANELS(X, name, 8) FOR_PANELS(X, name, 9) FOR_PANELS(X, name, 10) \
    FOR_PANELS(X, name, 11) FOR_PANELS(X, name, 12)
#else
#define FOR_VARIANTS(X, name) FOR_6(X, name)
#endif

#define ENTRY(name, rows, panels) .kernels[rows][panels] = name##_##rows##_##panels,
