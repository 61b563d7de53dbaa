/* Where codes, scales and minimums lie in a panel of low_bit.h.
 *
 * Shapes: panels of 16 columns by steps of 32 values, in one or two groups. Offsets alone: nothing is computed here. */
#pragma once

#include "low_bit.h"

#define SCALES (2 * PANEL) /* bytes of a group's scales, and of its minimums */
#define CODES(bits) (GROUP * PANEL * (bits) / 8) /* bytes of a step's codes */

/* One step of a panel. */
struct layout {
    int bits;
    int groups;
    int minimums; /* whether there are any */
    int precise; /* of the rows it meets: every value has two digits. Panels are the same */
};

static const struct layout layouts[] = {
    [INT4] = {4, 1, 1}, [INT8] = {8, 1, 1}, [INT4_CENTRED] = {4, 1, 0}, [INT8_CENTRED] = {8, 1, 0},
    [INT8_FINE] = {8, 2, 1},
};

#define MIDDLE(f) (1 << ((f).bits - 1))
#define STEP(f) (CODES((f).bits) + SCALES * (f).groups * (1 + (f).minimums))

INLINE const char *scales_at(const char *step, struct layout f, int group)
{
    return step + CODES(f.bits) + group * SCALES;
}

INLINE const char *minimums_at(const char *step, struct layout f, int group)
{
    return scales_at(step, f, f.groups + group);
}
