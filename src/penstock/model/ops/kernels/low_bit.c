/* The kernels of low_bit.h. A group's codes stay in registers while every row passes by. */
#include "low_bit.h"

#include "variants.h"

#define SCALES (2 * PANEL) /* bytes of a group's scales, and of its minimums */
#define CODES(bits) (GROUP * PANEL * (bits) / 8) /* bytes of a step's codes */

/* Of one step of a panel. */
struct layout {
    int bits;
    int groups;
    int minimums; /* whether there are any */
};

static const struct layout layouts[] = {
    [INT4] = {4, 1, 1}, [INT8] = {8, 1, 1}, [INT4_CENTRED] = {4, 1, 0}, [INT8_CENTRED] = {8, 1, 0},
    [INT8_FINE] = {8, 2, 1},
};

#define MIDDLE(f) (1 << ((f).bits - 1))
#define STEP(f) (CODES((f).bits) + SCALES * (f).groups * (1 + (f).minimums))

/* No two layouts have steps of one size. */
static struct layout layout_of(const struct arithmetic *a)
{
    int kind = INT4;
    while (STEP(layouts[kind]) != a->panel_step) kind++;
    return layouts[kind];
}

static const char *scales_at(const char *step, struct layout f, int group)
{
    return step + CODES(f.bits) + group * SCALES;
}

static const char *minimums_at(const char *step, struct layout f, int group)
{
    return scales_at(step, f, f.groups + group);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

struct group {
    int8_t values[GROUP];
    float scale;
    float sum, first; /* of the values, and of the first half, times the scale: what a minimum is multiplied with */
    int32_t centre; /* the sum, without the scale, times what the codes count from, less than nothing */
};

/* To the nearest of 255 values; the largest of a group is 127 or -127. */
INLINE void round_to_groups(const float *from, struct group *out, int count, const int middle)
{
    for (int k = 0; k < count; k += GROUP, out++) {
        uint32_t present = count - k < GROUP ? (1u << (count - k)) - 1 : ~0u;
        __m512 a = _mm512_maskz_loadu_ps((__mmask16)present, from + k);
        __m512 b = _mm512_maskz_loadu_ps((__mmask16)(present >> 16), from + k + 16);
        float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        _mm_storeu_si128((__m128i *)out->values, _mm512_cvtsepi32_epi8(low));
        _mm_storeu_si128((__m128i *)(out->values + 16), _mm512_cvtsepi32_epi8(high));
        int first = _mm512_reduce_add_epi32(low), sum = first + _mm512_reduce_add_epi32(high);
        out->scale = largest / 127.0f;
        out->sum = out->scale * (float)sum;
        out->first = out->scale * (float)first;
        out->centre = -middle * sum;
    }
}

static void round_for_int4(const float *from, void *to, int count) { round_to_groups(from, to, count, 8); }
static void round_for_int8(const float *from, void *to, int count) { round_to_groups(from, to, count, 128); }

INLINE __m512i four(const struct group *x, int at)
{
    int32_t values;
    memcpy(&values, x->values + 4 * at, 4);
    return _mm512_set1_epi32(values);
}

INLINE vf halves(const char *at) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE void load_codes(const char *w, const int bits, __m512i codes[GROUP / 4])
{
    if (bits == 8) {
        UNROLL for (int i = 0; i < 8; i++) codes[i] = _mm512_loadu_si512(w + 64 * i);
        return;
    }
    const __m512i lower = _mm512_set1_epi8(15);
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i both = _mm512_loadu_si512(w + 64 * i);
        codes[2 * i] = _mm512_and_si512(both, lower);
        codes[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), lower);
    }
}

INLINE vf scaled(vf acc, __m512i sum, const struct group *x, vf scale)
{
    return vfma((vf)_mm512_cvtepi32_ps(sum) * splat(x->scale), scale, acc);
}

INLINE void panel_product(const struct product *t, const int panel, const int rows, const int panels,
                          const struct layout f)
{
    vf acc[MOST_ROWS];
    FOR_ROWS acc[r] = splat(0.0f);
    const char *base[ROW_GROUPS];
    FOR_ROW_GROUPS base[g] = (const char *)t->x + 3 * g * t->x_stride;
    const char *w = t->panels[panel], *ahead = NULL;
    for (int k = 0, run = 0, left = 0; k < t->depth; k++, left--) {
        if (!left) {
            ahead = t->ahead[run++ * panels + panel];
            left = t->ahead_steps;
        }
        __m512i codes[GROUP / 4];
        load_codes(w, f.bits, codes);
        vf scale = halves(scales_at(w, f, 0)), minimum = f.minimums ? halves(minimums_at(w, f, 0)) : splat(0.0f);
        UNROLL for (int i = 0; i < STEP(f); i += 64) __builtin_prefetch(ahead + i, 0, 2);
        FOR_ROWS
        {
            const struct group *x = ROW(struct group, r);
            __m512i zero = _mm512_setzero_si512(), sums[2] = {f.minimums ? zero : _mm512_set1_epi32(x->centre), zero};
            UNROLL for (int i = 0; i < GROUP / 4; i++) {
                int to = f.groups == 2 ? i / 4 : i % 2; /* by turns, since each addition waits for the one before */
                sums[to] = _mm512_dpbusd_epi32(sums[to], codes[i], four(x, i));
            }
            if (f.groups == 1) {
                acc[r] = scaled(acc[r], _mm512_add_epi32(sums[0], sums[1]), x, scale);
                if (f.minimums) acc[r] = vfma(splat(x->sum), minimum, acc[r]);
            } else {
                acc[r] = scaled(acc[r], sums[0], x, scale);
                acc[r] = scaled(acc[r], sums[1], x, halves(scales_at(w, f, 1)));
                acc[r] = vfma(splat(x->first), minimum, acc[r]);
                acc[r] = vfma(splat(x->sum - x->first), halves(minimums_at(w, f, 1)), acc[r]);
            }
        }
        w += STEP(f);
        ahead += STEP(f);
        FOR_ROW_GROUPS base[g] += sizeof(struct group);
    }
    float *y = t->y + panel * PANEL;
    FOR_ROWS
    {
        acc[r] *= splat(t->unit);
        if (t->bias) acc[r] += load(t->bias + panel * PANEL);
        store(y, acc[r]);
        y += t->y_stride;
    }
}

INLINE void product_low_bit(const struct product *t, const int rows, const int panels, const struct layout f)
{
    for (int panel = 0; panel < panels; panel++) panel_product(t, panel, rows, panels, f);
}

#define product_int4(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){4, 1, 1})
#define product_int8(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){8, 1, 1})
#define product_int4_centred(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){4, 1, 0})
#define product_int8_centred(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){8, 1, 0})
#define product_int8_fine(t, rows, panels) product_low_bit(t, rows, panels, (struct layout){8, 2, 1})

FOR_VARIANTS(VARIANT, int4)
FOR_VARIANTS(VARIANT, int8)
FOR_VARIANTS(VARIANT, int4_centred)
FOR_VARIANTS(VARIANT, int8_centred)
FOR_VARIANTS(VARIANT, int8_fine)

#define ARITHMETIC(kind, bits, name) \
    [kind] = {GROUP, STEP(layouts[kind]), sizeof(struct group), round_for_int##bits, NULL, NULL, FOR_VARIANTS(ENTRY, name)}

const struct arithmetic *low_bit_arithmetic(enum low_bit kind)
{
    static const struct arithmetic all[] = {
        ARITHMETIC(INT4, 4, int4),
        ARITHMETIC(INT8, 8, int8),
        ARITHMETIC(INT4_CENTRED, 4, int4_centred),
        ARITHMETIC(INT8_CENTRED, 8, int8_centred),
        ARITHMETIC(INT8_FINE, 8, int8_fine),
    };
    return all + kind;
}

#else
const struct arithmetic *low_bit_arithmetic(enum low_bit kind) { return (void)kind, NULL; }
#endif

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
                memcpy((char *)scales_at(step, f, group) + 2 * column, codes->scales + at, 2);
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

void low_bit_column(const struct arithmetic *a, const char *panel, int column, float unit, float *out, int k)
{
    struct layout f = layout_of(a);
    for (int start = 0; start < k; start += GROUP, panel += STEP(f)) {
        uint8_t values[GROUP];
        get_codes(panel, f.bits, column, values);
        for (int group = 0, size = GROUP / f.groups; group < f.groups; group++) {
            float scale = from_half(scales_at(panel, f, group) + 2 * column);
            float minimum = f.minimums ? from_half(minimums_at(panel, f, group) + 2 * column) : 0.0f;
            for (int i = group * size; i < (group + 1) * size && start + i < k; i++)
                out[start + i] = ((float)(values[i] - (f.minimums ? 0 : MIDDLE(f))) * scale + minimum) * unit;
        }
    }
}
