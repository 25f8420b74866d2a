// Attention over a paged cache. One pass computes prompts, parts of prompts and decodes, without
// copying keys or values.
#pragma once

#include "kv_store.h"

namespace nano {

struct AttendArgs {
    Cache cache;
    int64_t table;   // the number of the layer's block table
    const float* q;  // [T, heads, head_dim]
    float* out;      // [T, heads, head_dim]
    int64_t heads;
    double scale;
    int64_t window;
};

// Sets out to softmax(scale · q Kᵀ) V. Each query sees its sequence up to itself, and of that the last
// `window` positions.
void attend(const AttendArgs& args, const Step& step, Member& member);

}  // namespace nano
