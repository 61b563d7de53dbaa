#pragma once

/* RMSNorm of one row of n; where `residual` is given, x is first added to it in place. */
void norm_row(const float *x, float *residual, const float *weight, float *out, int n, float eps);
