/* Norms, gates and caps of rows. Shapes: one row of any length. rows.c has the limit. */
#pragma once

#include "pool.h"

/* RMSNorm of one row of n; where `residual` is given, x is first added to it in place. */
void norm_row(const float *x, float *residual, const float *weight, float *out, int n, float eps);

/* silu(gate) * up */
void silu_row(const float *gate, const float *up, float *out, int n);

/* min(gate, limit) * sigmoid(alpha * gate) * (up + 1), up between -limit and limit: gpt-oss's */
void clamped_swiglu_row(const float *gate, const float *up, float *out, int n, float alpha, float limit);

/* cap * tanh(x / cap), in place: what is less than the cap by far stays as it is, nothing gets beyond it. */
void cap_row(float *x, int n, float cap);
