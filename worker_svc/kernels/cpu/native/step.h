// A step of T tokens of S sequences, as all phases see it. Its columns are those of
// worker_svc.step.tensors.StepTensors.
#pragma once

#include <cstdint>

namespace nano {

struct Step {
    int64_t tokens, sequences, tables;
    const int32_t* input_ids;      // [T]; −1 − r: the token that row r of the last step sampled
    const int32_t* last_tokens;    // [R]
    const int32_t* positions;      // [T]
    const int32_t* slots;          // [tables, T] in the cache
    const int32_t* query_starts;   // [S + 1] in T
    const int32_t* context_lens;   // [S]
    const int32_t* block_table;    // ragged
    const int32_t* table_offsets;  // [tables, S] in block_table
    const float* temperatures;     // [S]
    const double* uniforms;        // [S]

    // The slots of all tokens and the blocks of a sequence, in one of the tables. If there is only
    // one, all layers use it.
    const int32_t* slots_in(int64_t table) const { return slots + number(table) * tokens; }
    const int32_t* blocks_in(int64_t table, int64_t sequence) const {
        return block_table + table_offsets[number(table) * sequences + sequence];
    }
    int64_t number(int64_t table) const { return table < tables ? table : 0; }
};

}  // namespace nano
