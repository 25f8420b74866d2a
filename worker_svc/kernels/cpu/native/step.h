// A step of T tokens of S sequences, as all phases see it. Its columns are those of
// worker_svc.step.tensors.StepTensors.
#pragma once

#include <cstdint>

namespace nano {

struct Step {
    int64_t tokens, sequences;
    const int32_t* input_ids;      // [T]; −1 − r: the token that row r of the last step sampled
    const int32_t* last_tokens;    // [R]
    const int32_t* positions;      // [T]
    const int32_t* slots;          // [T] in the cache
    const int32_t* query_starts;   // [S + 1] in T
    const int32_t* context_lens;   // [S]
    const int32_t* block_table;    // ragged
    const int32_t* table_offsets;  // [S + 1] in block_table
    const float* temperatures;     // [S]
    const double* uniforms;        // [S]
};

}  // namespace nano
