/* What two cores with AVX512_BF16 can do at most: the limits in docs/benchmarks.md.
 *
 *     gcc -O2 -march=native -pthread tools/cpu_peak.c -o /tmp/cpu_peak && /tmp/cpu_peak
 *
 * The arithmetic loops are 24 independent sums in registers, in assembly: written in C, the compiler drops them or
 * spills them, and the figure is nonsense. Sane figures are one instruction a cycle, and above what the kernels reach. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define THREADS 2
#define ROUNDS 20000000L
#define BYTES (512ul << 20) /* for each thread: far beyond any cache */
#define SUMS 24
#define ONE(op, n) #op " %%zmm30,%%zmm31,%%zmm" #n "\n"
#define EIGHT(op, a, b, c, d, e, f, g, h) \
    ONE(op, a) ONE(op, b) ONE(op, c) ONE(op, d) ONE(op, e) ONE(op, f) ONE(op, g) ONE(op, h)
#define ALL(op)                                                                                     \
    EIGHT(op, 0, 1, 2, 3, 4, 5, 6, 7) EIGHT(op, 8, 9, 10, 11, 12, 13, 14, 15)                       \
        EIGHT(op, 16, 17, 18, 19, 20, 21, 22, 23)
#define USED                                                                                        \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
        "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm30", "xmm31"

static char *memory[THREADS];

static void *multiply(void *unused)
{
    __asm__ volatile(ALL(vpxorq) "vpxorq %%zmm30,%%zmm30,%%zmm30\nvpxorq %%zmm31,%%zmm31,%%zmm31\n" ::: USED);
    for (long i = 0; i < ROUNDS; i++) __asm__ volatile(ALL(vfmadd231ps)::: USED);
    return unused;
}

static void *multiply_pairs(void *unused)
{
    __asm__ volatile(ALL(vpxorq) "vpxorq %%zmm30,%%zmm30,%%zmm30\nvpxorq %%zmm31,%%zmm31,%%zmm31\n" ::: USED);
    for (long i = 0; i < ROUNDS; i++) __asm__ volatile(ALL(vdpbf16ps)::: USED);
    return unused;
}

static void *read_memory(void *thread)
{
    const char *from = memory[(long)thread];
    __m512i sum = _mm512_setzero_si512();
    for (size_t i = 0; i < BYTES; i += 64) __asm__ volatile("vpaddq %1,%0,%0" : "+v"(sum) : "m"(*(const __m512i *)(from + i)));
    return NULL;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double best_of_five(void *(*work)(void *))
{
    double best = 1e9;
    for (int round = 0; round < 5; round++) {
        pthread_t ids[THREADS];
        double started = seconds();
        for (long i = 0; i < THREADS; i++) pthread_create(&ids[i], NULL, work, (void *)i);
        for (int i = 0; i < THREADS; i++) pthread_join(ids[i], NULL);
        double spent = seconds() - started;
        if (spent < best) best = spent;
    }
    return best;
}

int main(void)
{
    for (int i = 0; i < THREADS; i++) {
        memory[i] = aligned_alloc(4096, BYTES);
        memset(memory[i], 1, BYTES);
    }
    double instructions = (double)SUMS * ROUNDS * THREADS;
    double plain = best_of_five(multiply), pairs = best_of_five(multiply_pairs), read = best_of_five(read_memory);
    printf("float32 multiply-add      %.3f TFLOP/s\n", 32 * instructions / plain / 1e12);
    printf("bfloat16 pair products    %.3f TFLOP/s\n", 64 * instructions / pairs / 1e12);
    printf("memory read               %.1f GB/s\n", (double)BYTES * THREADS / read / 1e9);
}
