// Products of rows with weight matrices in panels of PANEL columns.
//
// A loop multiplies up to MAX_ROWS rows with a panel, with all sums in registers (Goto and van de
// Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). The order of a row's sums does
// not depend on other rows.
#pragma once

#include "simd.h"
#include "team.h"

namespace nano {

constexpr int PANEL = 2 * LANES;

// How the weights of a panel lie in memory, step after step of the loop.
enum class Kind : int64_t {
    FLOAT32,     // one input: float32 [PANEL]
    BFLOAT16,    // one input: bfloat16 of a column in the low half of 32 bits, and in the high half
                 // of the column LANES to its right
    BF16_PAIRS,  // two inputs: bfloat16 [PANEL, 2]
    INT8,        // four inputs: uint8 [PANEL, 4], codes plus 128
    INT4,        // eight inputs: bytes [PANEL, 4], the first four in the low halves
};

// W [out, in], padded to whole panels and, in each group of inputs, to whole steps.
struct Weight {
    Kind kind;
    int64_t in, out;
    int64_t groups;        // groups of inputs with a scale of their own; 1 if there are no scales
    const char* codes;     // [panels, groups, steps of a group, ...]
    const float* scales;   // [panels, groups, PANEL], or null
    const int32_t* zeros;  // [panels, groups, PANEL], the codes of zero, for integers
    const float* bias;     // [out], or null
};

// Rows as the loops of a kind of weight read them.
struct Packed {
    uint32_t* words;  // [T, stride]
    int32_t* sums;    // [T, groups] sums of a group's codes, for integers
    float* scales;    // [T], by which to multiply products
    int64_t stride;
};

int64_t words_of(const Weight& weight);  // 32-bit words of a row of x
int64_t bytes_of_panel(const Weight& weight);
// The largest magnitude of a row x [in]. NaN counts as the largest of all.
float largest_magnitude(const float* x, int64_t in);
// The distance between rows, in words: whole lines, and an odd number of them, because lines of
// different rows would otherwise compete for the same places of the CPU's cache.
int64_t stride_of(int64_t words);

// Packs a row x [in]. `top` is the magnitude that becomes code 127, or negative to take the row's.
void pack_row(const Weight& weight, const float* x, float top, int64_t row, const Packed& out);

struct PackArgs {
    const Weight* weight;
    const int64_t* rows;  // their number
    const float* x;       // [T, in]
    const float* tops;    // [T], or null
    Packed out;
};
void pack(const PackArgs& args, Member& member);

struct ProductArgs {
    const Weight* weight;
    const int64_t* rows;
    Packed x;
    float* out;          // [T, out]
    const Weight* next;  // the weight that is multiplied next, or null
};
void product(const ProductArgs& args, Member& member);

}  // namespace nano
