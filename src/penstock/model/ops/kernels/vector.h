/* Vectors of float as wide as the machine's registers, and the few things done to them.
 *
 * Shapes: VL floats, 4 to 16. Limit: one instruction a cycle and port; the kernels that use them have the figures.
 *
 * GCC vector extensions, so one text serves AVX-512, AVX2, NEON and plain SSE. Every operation here is the same
 * instruction sequence wherever it is inlined: results must not depend on which kernel variant computed them. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define PANEL 16            /* columns of a panel, positions of a key tile */
#define LANES (PANEL / VL)  /* registers that one row of a panel fills */

typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));

INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE vf splat(float x) { return x - (vf){}; }

/* a * b + c. Spelled out, and the compiler may fuse nothing else (-ffp-contract=off): left alone, it fuses in one
 * kernel variant and not in the next, and then their results differ in the last bit. */
INLINE vf vfma(vf a, vf b, vf c)
{
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

#if VL == 16
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE float sum_of(vf v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float max_of(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return choose(a < b, a, b); }

INLINE float sum_of(vf v)
{
    float total = v[0];
    for (int i = 1; i < VL; i++) total += v[i];
    return total;
}

INLINE float max_of(vf v)
{
    float most = v[0];
    for (int i = 1; i < VL; i++) most = v[i] > most ? v[i] : most;
    return most;
}
#endif

/* e to the x, within about one unit in the last place; exactly 0 below -87.3, so that a masked score weighs nothing. */
INLINE vf vexp(vf x)
{
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vf clamped = vmin(x, splat(88.0f));
    vf shifted = vfma(clamped, splat(1.44269504f), splat(round_to_int));
    vf n = shifted - round_to_int;
    vf r = vfma(n, splat(-0.693145752f), clamped); /* ln 2 in two parts */
    r = vfma(n, splat(-1.42860677e-6f), r);
    vf p = splat(0.00139336521f); /* (e^r - 1 - r) / r^2, fitted on |r| <= ln 2 / 2 */
    p = vfma(p, r, splat(0.00836317986f));
    p = vfma(p, r, splat(0.0416664667f));
    p = vfma(p, r, splat(0.166665763f));
    p = vfma(p, r, splat(0.5f));
    p = vfma(p, r, splat(1.0f));
    p = vfma(p, r, splat(1.0f));
    vi power = (vi)shifted << 23; /* the integer, moved to where the exponent is */
    return (vf)(((vi)p + power) & (x > -87.3f));
}

INLINE float from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Round to nearest even; a NaN stays one. */
INLINE uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
