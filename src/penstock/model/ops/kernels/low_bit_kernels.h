/* The text of the kernels of low_bit.h, for the files that compile it: each has a few of the arithmetics, so that none
 * takes long. The codes of two panels stay in registers while every row passes by, and four values of a row are loaded
 * once for both: loads are what such products wait for.
 *
 * Shapes: 1 to MOST_ROWS rows by two panels. Limit: with a few rows the reading of codes, with many the arithmetic:
 * one core of a Zen 4 does 0.47 TOP/s of 8-bit products, scaling the groups' sums leaves 0.34 of them, and these
 * kernels reach 0.32 from the first-level cache (docs/cpu.md; rows of one digit). */
#pragma once

#include "low_bit_layout.h"
#include "variants.h"

#include <float.h>

#if HAS_LOW_BIT

#define QUADS (GROUP / 4)
#define QUAD_BYTES (4 * PANEL) /* of the codes that a quad meets, one to a byte */
#define STEP_CODES (QUADS * QUAD_BYTES)
#define BATCH 4 /* rows that take turns: as many sums as there are registers for */
/* Bits of the first digit where there is a second. Codes of 4 bits leave room in their bytes to be shifted by 4. */
#define SHIFTS(f) ((f).bits == 4 && !(f).e2m1)
#define DIGIT(f) (SHIFTS(f) && !(f).precise ? 4 : 7)

struct group {
    int8_t values[GROUP]; /* where there are second digits: first digits */
    int32_t wide; /* which quad has second digits, where one has: the bytes before its codes */
    float scale;
    float sum, first; /* of the values, and of the first half, times the scale: what a minimum is multiplied with */
    int32_t centre; /* the sum, without the scale, times what the codes count from, less than nothing */
    int8_t seconds[GROUP]; /* the wide quad's four, or all of them */
};

#define SECONDS(precise) ((precise) ? GROUP : 4)
#define ROW_STEP(precise) ((int)offsetof(struct group, seconds) + SECONDS(precise))

/* The largest of four vectors, quad by quad: in lane l, value i is that of lane l of vector i. */
INLINE __m512i largest_of_quads(const __m512i x[4])
{
    __m512i a = _mm512_max_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i b = _mm512_max_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* The largest of a group's eight keys, two groups side by side in every lane. */
INLINE __m512i largest_of_groups(__m512i keys)
{
    keys = _mm512_max_epi32(keys, _mm512_shuffle_epi32(keys, 0xb1));
    keys = _mm512_max_epi32(keys, _mm512_shuffle_i32x4(keys, keys, 0xb1));
    return _mm512_max_epi32(keys, _mm512_shuffle_i32x4(keys, keys, 0x4e));
}

/* The sums of the halves of two groups, given as 16-bit integers, in every lane. */
INLINE __m512i sums_of_halves(const __m512i x[2])
{
    const __m512i ones = _mm512_set1_epi16(1);
    __m512 a = (__m512)_mm512_madd_epi16(x[0], ones), b = (__m512)_mm512_madd_epi16(x[1], ones);
    __m512i sums = _mm512_add_epi32((__m512i)_mm512_shuffle_ps(a, b, 0x88), (__m512i)_mm512_shuffle_ps(a, b, 0xdd));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
    return _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0x4e));
}

/* 16-bit integers as bytes in the order of the values, which packing twice leaves in turns. */
INLINE void store_bytes(int8_t to[2 * GROUP], const __m512i x[2])
{
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(x[0], x[1])));
}

/* Two groups, of which the first `groups` are kept, to the nearest multiples of their scales. Where one quad of a group
 * is wide, it is the one with the largest magnitude, and of the others the largest is 127 or -127. Magnitudes are
 * compared as integers, which floats above zero allow, with the quad's number for their last bits. */
INLINE char *round_two(const __m512 x[4], char *to, const int groups, const struct layout f)
{
    const __m512i numbers = _mm512_set_epi32(7, 3, 7, 3, 6, 2, 6, 2, 5, 1, 5, 1, 4, 0, 4, 0);
    const __m512i number = _mm512_set1_epi32(QUADS - 1), nearest = _mm512_set1_epi16(1 << (DIGIT(f) - 1));
    __m512i v[4], firsts[2], seconds[2];
    UNROLL for (int i = 0; i < 4; i++) v[i] = _mm512_castps_si512(_mm512_abs_ps(x[i]));
    __m512i keys = _mm512_ternarylogic_epi32(largest_of_quads(v), numbers, number, 0xd8);
    __m512i top = largest_of_groups(keys);
    __m512i rest = largest_of_groups(_mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(keys, top), keys));
    __m512 scale = _mm512_mul_ps((__m512)top, _mm512_set1_ps(1.0f / (127 << DIGIT(f))));
    if (!f.precise) scale = _mm512_max_ps(_mm512_mul_ps((__m512)rest, _mm512_set1_ps(1.0f / 127)), scale);
    __m512 inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(scale, _mm512_set1_ps(FLT_MIN), _CMP_GE_OQ),
                                         _mm512_set1_ps(1.0f), scale);
    const __m512 inverses[2] = {_mm512_permute_ps(inverse, 0x00), _mm512_permute_ps(inverse, 0xaa)};
    UNROLL for (int i = 0; i < 4; i++) v[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverses[i / 2]));
    UNROLL for (int i = 0; i < 2; i++) {
        v[i] = _mm512_packs_epi32(v[2 * i], v[2 * i + 1]);
        seconds[i] = _mm512_srai_epi16(_mm512_add_epi16(v[i], nearest), DIGIT(f));
        firsts[i] = _mm512_sub_epi16(v[i], _mm512_slli_epi16(seconds[i], DIGIT(f)));
    }
    int8_t values[2 * GROUP], first_digits[2 * GROUP], second_digits[2 * GROUP];
    int32_t wide[4], sums[4];
    float scales[4];
    store_bytes(values, v);
    store_bytes(first_digits, firsts);
    store_bytes(second_digits, seconds);
    _mm_storeu_si128((__m128i *)wide, _mm512_castsi512_si128(_mm512_and_si512(top, number)));
    _mm_storeu_si128((__m128i *)sums, _mm512_castsi512_si128(sums_of_halves(v)));
    _mm_storeu_ps(scales, _mm512_castps512_ps128(scale));
    UNROLL for (int g = 0; g < groups; g++, to += ROW_STEP(f.precise)) {
        struct group *out = (struct group *)to;
        int quad = wide[2 * g], first = sums[2 * g], sum = first + sums[2 * g + 1];
        int start = f.precise ? 0 : 4 * quad; /* of the values with second digits */
        if (!f.precise) memcpy(out->values, values + GROUP * g, GROUP);
        memcpy(out->values + start, first_digits + GROUP * g + start, SECONDS(f.precise));
        memcpy(out->seconds, second_digits + GROUP * g + start, SECONDS(f.precise));
        out->wide = QUAD_BYTES * quad;
        out->scale = scales[2 * g];
        out->sum = out->scale * (float)sum;
        out->first = out->scale * (float)first;
        out->centre = -MIDDLE(f) * sum;
    }
    return to;
}

INLINE void round_to_groups(const float *from, char *to, int count, const struct layout f)
{
    for (; count > 0; count -= 2 * GROUP, from += 2 * GROUP) {
        uint64_t present = count < 2 * GROUP ? (1ull << count) - 1 : ~0ull;
        __m512 x[4];
        UNROLL for (int i = 0; i < 4; i++) x[i] = _mm512_maskz_loadu_ps((__mmask16)(present >> 16 * i), from + 16 * i);
        to = count > GROUP ? round_two(x, to, 2, f) : round_two(x, to, 1, f);
    }
}

INLINE __m512i splat_four(const void *values)
{
    int32_t four;
    memcpy(&four, values, 4);
    return _mm512_set1_epi32(four);
}

INLINE vf halves(const char *at) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

/* Powers of two, by their exponents. The least of all, which a float has no exponent for, is as good as nothing. */
INLINE vf powers(const char *at)
{
    return (vf)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)), 23);
}

/* One step of a panel, in registers. */
struct step {
    __m512i codes[QUADS];
    vf scales[2], minimums[2];
    const char *wide; /* the codes that second digits meet, [QUADS] of QUAD_BYTES */
};

/* Codes of 4 bits meet a wide quad's second digits shifted, in `shifted`, where those that are looked up are as they
 * are; others meet them in the panel. */
INLINE struct step load_step(const char *w, char shifted[STEP_CODES], const struct layout f)
{
    struct step s = {.wide = f.bits == 4 ? shifted : w};
    const __m512i lower = _mm512_set1_epi8(15);
    const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi8(TWICE_E2M1));
    UNROLL for (int i = 0; i < QUADS; i++)
        if (f.bits == 8) s.codes[i] = _mm512_loadu_si512(w + QUAD_BYTES * i);
        else {
            __m512i both = _mm512_loadu_si512(w + QUAD_BYTES * (i / 2)), others = _mm512_andnot_si512(lower, both);
            s.codes[i] = i % 2 ? _mm512_srli_epi16(others, 4) : _mm512_and_si512(both, lower);
            if (f.e2m1) s.codes[i] = _mm512_shuffle_epi8(twice, s.codes[i]);
            if (!f.precise && f.e2m1) _mm512_store_si512(shifted + QUAD_BYTES * i, s.codes[i]);
            else if (!f.precise)
                _mm512_store_si512(shifted + QUAD_BYTES * i, i % 2 ? others : _mm512_slli_epi16(s.codes[i], DIGIT(f)));
        }
    UNROLL for (int g = 0; g < f.groups; g++) {
        s.scales[g] = f.e2m1 ? powers(scales_at(w, f, g)) : halves(scales_at(w, f, g));
        if (f.minimums) s.minimums[g] = halves(minimums_at(w, f, g));
    }
    return s;
}

#define FOR_STEPS UNROLL for (int p = 0; p < MOST_PANELS; p++)

/* A wide quad's second digits times their codes, added to the sum of their group. */
INLINE void add_seconds(__m512i sums[2], const struct group *x, const char *wide, const struct layout f)
{
    __m512i codes = _mm512_loadu_si512(wide + x->wide), four = splat_four(x->seconds);
    if (SHIFTS(f)) {
        sums[0] = _mm512_dpbusd_epi32(sums[0], codes, four);
        return;
    }
    __m512i sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, four), DIGIT(f));
    __mmask16 is_second = f.groups == 2 && x->wide >= STEP_CODES / 2 ? 0xffff : 0;
    if (f.groups == 2) sums[1] = _mm512_mask_add_epi32(sums[1], is_second, sums[1], sum);
    sums[0] = _mm512_mask_add_epi32(sums[0], ~is_second, sums[0], sum);
}

typedef __m512i sums_of_rows[BATCH][MOST_PANELS][2]; /* by panel and group of codes */

/* A digit of every value times its code, quad by quad and the rows in turns, since a product waits for the one before
 * it in its sum. */
INLINE void add_digits(sums_of_rows sums, const char *digits, const size_t stride, const int rows,
                       const struct step *steps, const struct layout f)
{
    UNROLL for (int i = 0; i < QUADS; i++)
        UNROLL for (int r = 0; r < rows; r++) {
            __m512i four = splat_four(digits + r * stride + 4 * i);
            FOR_STEPS
            {
                __m512i *sum = &sums[r][p][i * f.groups / QUADS];
                *sum = _mm512_dpbusd_epi32(*sum, steps[p].codes[i], four);
            }
        }
}

/* One step of a few rows. */
INLINE void step_product(const char *x, const size_t stride, vf (*acc)[MOST_PANELS], const int rows,
                         const struct step *steps, const struct layout f)
{
    const struct group *row[BATCH];
    sums_of_rows sums;
    UNROLL for (int r = 0; r < rows; r++) {
        row[r] = (const struct group *)(x + r * stride);
        UNROLL for (int g = 0; g < 2; g++) FOR_STEPS sums[r][p][g] = _mm512_setzero_si512();
    }
    if (f.precise) {
        add_digits(sums, x + offsetof(struct group, seconds), stride, rows, steps, f);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int g = 0; g < f.groups; g++)
                FOR_STEPS sums[r][p][g] = _mm512_slli_epi32(sums[r][p][g], DIGIT(f));
    }
    if (!f.minimums)
        UNROLL for (int r = 0; r < rows; r++)
            FOR_STEPS sums[r][p][0] = _mm512_add_epi32(sums[r][p][0], _mm512_set1_epi32(row[r]->centre));
    add_digits(sums, x + offsetof(struct group, values), stride, rows, steps, f);
    if (!f.precise)
        UNROLL for (int r = 0; r < rows; r++) FOR_STEPS add_seconds(sums[r][p], row[r], steps[p].wide, f);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int g = 0; g < f.groups; g++) {
            float part = f.groups == 1 ? row[r]->sum : g ? row[r]->sum - row[r]->first : row[r]->first;
            FOR_STEPS
            {
                vf sum = (vf)_mm512_cvtepi32_ps(sums[r][p][g]) * splat(row[r]->scale);
                acc[r][p] = vfma(sum, steps[p].scales[g], acc[r][p]);
                if (f.minimums) acc[r][p] = vfma(splat(part), steps[p].minimums[g], acc[r][p]);
            }
        }
}

/* Locals, since a store of a vector could change any field. */
INLINE void write_out(const struct product *t, vf (*acc)[MOST_PANELS])
{
    const vf unit = splat(t->unit);
    const float *const bias = t->bias;
    const size_t stride = t->y_stride;
    float *y = t->y;
    _Pragma("GCC unroll 1") for (vf (*end)[MOST_PANELS] = acc + t->rows; acc < end; acc++, y += stride)
        FOR_STEPS
        {
            vf sum = acc[0][p] * unit;
            if (bias) sum += load(bias + p * PANEL);
            store(y + p * PANEL, sum);
        }
}

/* Rows in batches of four, counted only when it runs, and then the last zero to three: so few kernels serve all numbers
 * of rows. */
INLINE void product_low_bit(const struct product *t, const int last, const struct layout f)
{
    const size_t stride = t->x_stride;
    const int whole = t->rows - last;
    vf acc[MOST_ROWS][MOST_PANELS] __attribute__((aligned(64)));
    for (int r = 0; r < t->rows; r++) FOR_STEPS acc[r][p] = splat(0.0f);
    const char *x = t->x, *w[MOST_PANELS], *ahead[MOST_PANELS];
    FOR_STEPS w[p] = t->panels[p];
    for (int k = 0, run = 0, left = 0; k < t->depth; k++, left--) {
        if (!left) {
            FOR_STEPS ahead[p] = t->ahead[run * MOST_PANELS + p];
            run++;
            left = t->ahead_steps;
        }
        struct step steps[MOST_PANELS];
        char shifted[MOST_PANELS][STEP_CODES] __attribute__((aligned(64)));
        FOR_STEPS
        {
            steps[p] = load_step(w[p], shifted[p], f);
            UNROLL for (int i = 0; i < STEP(f); i += 64) __builtin_prefetch(ahead[p] + i, 0, 2);
            w[p] += STEP(f);
            ahead[p] += STEP(f);
        }
        const char *from = x;
        _Pragma("GCC unroll 1") for (int r = 0; r < whole; r += BATCH, from += BATCH * stride)
            step_product(from, stride, acc + r, BATCH, steps, f);
        if (last) step_product(from, stride, acc + whole, last, steps, f);
        x += ROW_STEP(f.precise);
    }
    write_out(t, acc);
}

#define KERNEL(name, last) \
    static void name##_##last(const struct product *t) { product_low_bit(t, last, layout_##name()); }
#define ENTRY_OF(name, last) {[MOST_PANELS] = name##_##last}
#define ENTRIES(name) ENTRY_OF(name, 1), ENTRY_OF(name, 2), ENTRY_OF(name, 3), ENTRY_OF(name, 0)

/* One arithmetic, with all its kernels. */
#define ARITHMETIC(name, twin, kind, is_precise)                                                                       \
    INLINE struct layout layout_##name(void)                                                                           \
    {                                                                                                                  \
        return (struct layout){layouts[kind].bits, layouts[kind].groups, layouts[kind].minimums, is_precise,           \
                               layouts[kind].e2m1};                                                                    \
    }                                                                                                                  \
    KERNEL(name, 0) KERNEL(name, 1) KERNEL(name, 2) KERNEL(name, 3)                                                    \
    static void round_for_##name(const float *from, void *to, int count)                                               \
    {                                                                                                                  \
        round_to_groups(from, to, count, layout_##name());                                                             \
    }                                                                                                                  \
    const struct arithmetic low_bit_##name = {                                                                         \
        GROUP, STEP(layouts[kind]), ROW_STEP(is_precise), round_for_##name, NULL, NULL,                                \
        {{NULL}, ENTRIES(name), ENTRIES(name), ENTRIES(name)}, .precise = twin};

#define ARITHMETICS(name, kind)                  \
    ARITHMETIC(name##_precise, NULL, kind, 1)     \
    ARITHMETIC(name, &low_bit_##name##_precise, kind, 0)

#else
#define ARITHMETICS(name, kind)
#endif
