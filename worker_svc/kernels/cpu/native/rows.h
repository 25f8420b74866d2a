// The operations between the products, each in one pass over its rows. Those whose result is only
// multiplied pack it for that product, too.
#pragma once

#include "products.h"
#include "step.h"

namespace nano {

// Where rows are packed for a product, unless `weight` is null.
struct PackTo {
    const Weight* weight;
    Packed out;
};

struct EmbedArgs {
    Vector table;          // [rows, size], unless there are codes
    const Weight* codes;   // INT8 without groups, or null
    int64_t size;
    int64_t start, count;  // ids outside [start, start + count) give zeros
    double scale;          // of the rows
    float* out;            // [T, size]
};
void embed(const EmbedArgs& args, const Step& step, Member& member);

// out = x / rms(x) · weight, or x if the weight is null, after `residual += x` (then of residual)
// unless residual is null.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
struct NormArgs {
    const int64_t* rows;
    // Whether x or residual has rows of all tokens, of which row r is the last of sequence r.
    int64_t x_is_whole, residual_is_whole;
    int64_t size;
    const float* x;
    float* residual;
    Vector weight;
    double eps;
    float* out;  // [rows, size], or null if only the packed rows are read
    PackTo pack;
};
void norm(const NormArgs& args, const Step& step, Member& member);

enum Activation : int64_t { SILU, GELU_TANH };

struct ActivateArgs {
    const int64_t* rows;
    int64_t size;
    Activation activation;
    const float* gate_up;  // [T, 2 · size], gate before up
    float* out;            // [T, size] activation(gate) · up, or null as in NormArgs
    PackTo pack;
};
void activate(const ActivateArgs& args, Member& member);

// Two parts of rows x [T, stride], which are its first sizes[0] columns and the next sizes[1].
struct PartsArgs {
    const int64_t* rows;
    int64_t stride, sizes[2], total_sizes[2];  // total: over all ranks
    float* x;
    float* squares;  // [T, 2], the sums of squares of the parts
    Vector weight;   // [sizes[0] + sizes[1]]
    double eps;
};
// Sets `squares` to those of x.
void sum_squares(const PartsArgs& args, Member& member);
// x = x / rms(x) · weight in each part, by `squares` over all ranks.
void scale_parts(const PartsArgs& args, Member& member);

// The largest magnitudes of this rank's part of each segment of rows x [T, size]; 0 of segments that it
// has no part of.
struct MaximaArgs {
    const int64_t* rows;
    int64_t size;
    const float* x;
    float* out;  // [T, stride]
    int64_t stride, first_input, segment;  // as in `Tops`
};
void maxima(const MaximaArgs& args, Member& member);

}  // namespace nano
