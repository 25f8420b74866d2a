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
    INT6,        // 16 inputs: the low halves of codes, as two steps of INT4, and bytes [PANEL, 4] with
                 // two high bits of each of four inputs, the first four in the lowest bits
};

// W [out, in], padded to whole panels and, in each group of inputs, to whole steps.
struct Weight {
    Kind kind;
    int64_t in, out;
    int64_t groups;        // of inputs, each with scales of its own; 1 if there are no scales
    // Integers multiply rows whose `segment` inputs have a scale of their own. A segment is within a
    // group; the last one may be shorter if there is one group.
    int64_t segment;
    const char* codes;     // [panels, groups, steps of a group, ...]
    const float* scales;   // [panels, groups, PANEL], or null
    const int32_t* zeros;  // [panels, groups, PANEL], the codes of zero, or null: 128 of INT8,
                           // 32 of INT6, 8 of INT4
    const float* bias;     // [out], or null
};

// Rows as the loops of a kind of weight read them.
struct Packed {
    uint32_t* words;  // [T, stride]
    // [T, segments], of integers: the sums of a segment's codes, times −zero if that is the same for
    // all.
    // If the products are added up in words, those of the two words of each lane.
    int32_t* sums;
    float* scales;    // [T, segments]
    int64_t stride;
};

// The magnitudes that become code 127, if other ranks have a part of a segment. Source [T, segments
// of all ranks].
struct Tops {
    const float* data;
    int64_t stride;       // segments of all ranks
    int64_t first_input;  // of this rank
    int64_t segment;      // inputs that share a magnitude
};

int64_t words_of(const Weight& weight);  // 32-bit words of a row of x
int64_t bytes_of_panel(const Weight& weight);
// The largest magnitude of a row x [in]. NaN counts as the largest of all.
float largest_magnitude(const float* x, int64_t in);
// The distance between rows, in words: whole lines, and an odd number of them, because lines of
// different rows would otherwise compete for the same places of the CPU's cache.
int64_t stride_of(int64_t words);

int64_t segments_of(const Weight& weight);

// Packs a row x [in]. A segment's largest magnitude becomes code 127, unless there are `tops`.
void pack_row(const Weight& weight, const float* x, const Tops* tops, int64_t row,
              const Packed& out);

struct PackArgs {
    const Weight* weight;
    const int64_t* rows;  // their number
    const float* x;       // [T, in]
    const Tops* tops;     // or null
    Packed out;
};
void pack(const PackArgs& args, Member& member);

// Rows [starts[g], starts[g + 1]) are multiplied with matrix g of several equal ones, whose panels
// follow each other. The `Weight` is the first of them.
struct Groups {
    const int64_t* starts;  // [count + 1], or null: there is one matrix
    int64_t count;
};

struct ProductArgs {
    const Weight* weight;
    const int64_t* rows;
    Packed x;
    float* out;          // [T, out]
    Groups groups;
    const Weight* next;  // the weight that is multiplied next, or null
    Groups next_groups;
};
void product(const ProductArgs& args, Member& member);

// Row `row` of W, of integers, [in].
void row_of(const Weight& weight, int64_t row, float* out);

}  // namespace nano
