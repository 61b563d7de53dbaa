/* The panels of low_bit.h: which kernels there are for them, how they are packed, and a column of them.
 *
 * Shapes: weights [n, k] of any size, packed when a model is loaded; one column at a time for embeddings. Limit:
 * memory, for each weight is read once. The time was not measured. */
#include "low_bit_layout.h"

#include <math.h>

#if HAS_LOW_BIT
extern const struct arithmetic low_bit_int4, low_bit_int8, low_bit_int4_centred, low_bit_int8_centred, low_bit_int8_fine;
extern const struct arithmetic low_bit_mxfp4;

const struct arithmetic *low_bit_arithmetic(enum low_bit kind)
{
    static const struct arithmetic *const all[] = {
        [INT4] = &low_bit_int4, [INT8] = &low_bit_int8, [INT4_CENTRED] = &low_bit_int4_centred,
        [INT8_CENTRED] = &low_bit_int8_centred, [INT8_FINE] = &low_bit_int8_fine, [MXFP4] = &low_bit_mxfp4,
    };
    return all[kind];
}
#else
const struct arithmetic *low_bit_arithmetic(enum low_bit kind) { return (void)kind, NULL; }
#endif

/* No two layouts of panels have steps of one size. */
static struct layout layout_of(const struct arithmetic *a)
{
    int kind = INT4;
    while (STEP(layouts[kind]) != a->panel_step) kind++;
    return layouts[kind];
}

/* A column of a group. */
static void put_codes(char *group, int bits, int column, const uint8_t values[GROUP])
{
    for (int i = 0; i < GROUP / 4; i++) {
        uint32_t lower, upper;
        memcpy(&lower, values + 4 * i, 4);
        if (bits == 4) {
            memcpy(&upper, values + 4 * ++i, 4);
            lower |= upper << 4;
        }
        memcpy(group + ((bits == 4 ? i / 2 : i) * PANEL + column) * 4, &lower, 4);
    }
}

static void get_codes(const char *group, int bits, int column, uint8_t values[GROUP])
{
    for (int k = 0; k < GROUP; k++) {
        uint8_t byte = (uint8_t)group[((bits == 4 ? k / 8 : k / 4) * PANEL + column) * 4 + k % 4];
        values[k] = bits == 8 ? byte : k / 4 % 2 ? byte >> 4 : byte & 15;
    }
}

void low_bit_pack(char *panel, const struct arithmetic *a, const struct codes *codes, int first, int columns, int k)
{
    struct layout f = layout_of(a);
    int size = codes->groups == 1 ? k : k / codes->groups;
    for (int column = 0; column < columns; column++) {
        char *step = panel;
        for (int start = 0; start < k; start += GROUP, step += STEP(f)) {
            uint8_t values[GROUP] = {0};
            memcpy(values, codes->values + (size_t)(first + column) * k + start, k - start < GROUP ? k - start : GROUP);
            put_codes(step, f.bits, column, values);
            for (int group = 0; group < f.groups && start + group * GROUP / f.groups < k; group++) {
                size_t at = (size_t)(first + column) * codes->groups + (start + group * GROUP / f.groups) / size;
                int size = SCALE_BYTES(f);
                memcpy((char *)scales_at(step, f, group) + size * column, (const char *)codes->scales + size * at, size);
                if (f.minimums) memcpy((char *)minimums_at(step, f, group) + 2 * column, codes->minimums + at, 2);
            }
        }
    }
}

static float from_half(const char *at)
{
    uint16_t half;
    memcpy(&half, at, 2);
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    uint32_t bits = (uint32_t)(exponent + 112) << 23 | (uint32_t)mantissa << 13;
    float x;
    memcpy(&x, &bits, 4);
    if (!exponent) x = (float)mantissa * 0x1p-24f;
    return half >> 15 ? -x : x;
}

static float scale_at(const char *scales, struct layout f, int column)
{
    if (!f.e2m1) return from_half(scales + 2 * column);
    return ldexpf(1.0f, (uint8_t)scales[column] - 127);
}

void low_bit_column(const struct arithmetic *a, const char *panel, int column, float unit, float *out, int k)
{
    static const uint8_t twice[] = {TWICE_E2M1};
    struct layout f = layout_of(a);
    for (int start = 0; start < k; start += GROUP, panel += STEP(f)) {
        uint8_t values[GROUP];
        get_codes(panel, f.bits, column, values);
        for (int i = 0; i < GROUP && f.e2m1; i++) values[i] = twice[values[i]];
        for (int group = 0, size = GROUP / f.groups; group < f.groups; group++) {
            float scale = scale_at(scales_at(panel, f, group), f, column);
            float minimum = f.minimums ? from_half(minimums_at(panel, f, group) + 2 * column) : 0.0f;
            for (int i = group * size; i < (group + 1) * size && start + i < k; i++)
                out[start + i] = ((float)(values[i] - (f.minimums ? 0 : MIDDLE(f))) * scale + minimum) * unit;
        }
    }
}
