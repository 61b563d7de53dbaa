/* Where codes, scales and minimums lie in a panel of low_bit.h.
 *
 * Shapes: panels of 16 columns by steps of 32 values, in one or two groups. Offsets alone: nothing is computed here. */
#pragma once

#include "low_bit.h"

#define SCALE_BYTES(f) (2 - (f).e2m1) /* and of a minimum */
#define SCALES(f) (SCALE_BYTES(f) * PANEL) /* bytes of a group's scales, and of its minimums */
#define CODES(bits) (GROUP * PANEL * (bits) / 8) /* bytes of a step's codes */

/* One step of a panel. */
struct layout {
    int bits;
    int groups;
    int minimums; /* whether there are any */
    int precise; /* of the rows it meets: every value has two digits. Panels are the same */
    int e2m1; /* codes are looked up, and scales are exponents */
};

/* All fields are named: what is left out no initializer can be computed from. */
static const struct layout layouts[] = {
    [INT4] = {4, 1, 1, 0, 0}, [INT8] = {8, 1, 1, 0, 0}, [INT4_CENTRED] = {4, 1, 0, 0, 0},
    [INT8_CENTRED] = {8, 1, 0, 0, 0}, [INT8_FINE] = {8, 2, 1, 0, 0}, [MXFP4] = {4, 1, 0, 0, 1},
};

#define MIDDLE(f) ((f).e2m1 ? 12 : 1 << ((f).bits - 1))
#define STEP(f) (CODES((f).bits) + SCALES(f) * (f).groups * (1 + (f).minimums))
/* Of e2m1, by its 4 bits: the number twice, and 12 more. */
#define TWICE_E2M1 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

INLINE const char *scales_at(const char *step, struct layout f, int group)
{
    return step + CODES(f.bits) + group * SCALES(f);
}

INLINE const char *minimums_at(const char *step, struct layout f, int group)
{
    return scales_at(step, f, f.groups + group);
}
