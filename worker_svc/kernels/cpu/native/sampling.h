// The phases of a step that sample tokens and keep them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"
#include "step.h"
#include "team.h"

namespace nano {

// With fewer logits than this, one thread is done before a second thread wakes.
constexpr int64_t PARALLEL_LOGITS = 1 << 15;

struct StoreTokensArgs {
    int32_t* cache;  // [slots]
};

struct ChunkStatisticsArgs {
    const float* logits;  // [sequences, >= chunks · chunk_size]
    int64_t row_size;     // from the beginning of a row of logits to the next
    int64_t chunk_size, chunks;
    int64_t num_tokens;  // columns that count
    float *maxima, *sums;  // [sequences, chunks]
};

struct SelectTokensArgs {
    const float* logits;  // as above
    int64_t row_size, chunk_size;
    int64_t chunks;  // in `logits`
    int64_t num_tokens;
    const float *maxima, *sums;  // [sequences, all_chunks], of all ranks
    int64_t all_chunks;
    int64_t first_chunk;  // the number of this rank's first chunk
    int32_t* tokens;      // [sequences]
};

// Stores the ids of the step's tokens in their slots. Slot −1 is nowhere.
void store_tokens(const StoreTokensArgs& args, const Step& step, Member& member);

// Computes the largest logit m of each chunk and the sum of exp((logit − m) / temperature), which is
// 0 in a greedy row.
void chunk_statistics(const ChunkStatisticsArgs& args, const Step& step, Member& member);

// Selects a token per sequence: in a greedy row the first of the largest logits, else the inverse of
// the cumulative distribution at the uniform number. The token is −1 if another rank has its chunk.
void select_tokens(const SelectTokensArgs& args, const Step& step, Member& member);

// The first `count` of 16 logits. The other lanes are −∞.
inline F32s load_logits(const float* numbers, int64_t count) {
    if (count >= LANES) return load<F32s>(numbers);
    F32s some = splat(-INFINITY);
    std::memcpy(&some, numbers, count * sizeof(float));
    return some;
}

// eˣ for x up to 88, or 0 if x is NaN.
inline F32s exp_or_zero(F32s x) { return exp_in_range(larger(x, splat(-88.0f))); }

}  // namespace nano
