// The paged cache of keys and values, and the phase that writes to it.
#pragma once

#include <algorithm>

#include "simd.h"
#include "step.h"
#include "team.h"

namespace nano {

enum CacheType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// A cache [2, blocks, kv_heads, head_bytes], keys before values. For each block and head it holds
//
//     keys    [slots / 16, head_dim / depth, 16, depth]: a vector holds dimensions of 16 keys
//     values  [slots / depth, row_size, depth]
//
// where depth is how many numbers fit into a word of 32 bits, slots and row_size are multiples of
// 16, and head_dim is padded to a multiple of depth. int8 codes of keys are unsigned bytes, larger
// by KEY_ZERO. The scales float32 [slots] of int8 codes follow the codes.
struct Cache {
    uint8_t* data;
    int64_t type, blocks, block_size, kv_heads, head_dim;

    int64_t depth() const { return type == FLOAT32 ? 1 : type == BFLOAT16 ? 2 : 4; }
    int64_t slots() const { return padded(block_size, LANES); }
    int64_t row_size() const { return padded(head_dim, LANES); }
    int64_t code_bytes() const { return slots() * row_size() * 4 / depth(); }
    int64_t head_bytes() const { return code_bytes() + (type == INT8 ? 4 * slots() : 0); }
    uint8_t* keys(int64_t block, int64_t kv_head) const {
        return data + (block * kv_heads + kv_head) * head_bytes();
    }
    uint8_t* values(int64_t block, int64_t kv_head) const { return keys(blocks + block, kv_head); }
};

constexpr int KEY_ZERO = 128;

// Calls work(done, block, slot, run) for the runs of slots of a block that hold positions
// [first, first + size) of a sequence, where `done` positions come before the run.
template <class Work>
inline void each_run(const Cache& cache, const int32_t* blocks, int64_t first, int64_t size,
                     const Work& work) {
    for (int64_t done = 0; done < size;) {
        const int64_t position = first + done, slot = position % cache.block_size;
        const int64_t run = std::min(cache.block_size - slot, size - done);
        work(done, blocks[position / cache.block_size], slot, run);
        done += run;
    }
}

struct RopeStoreArgs {
    Cache cache;
    int64_t table;         // the number of the layer's block table
    const float* qkv;      // [T, heads + 2 · kv_heads, head_dim]
    float* q;              // [T, heads, head_dim]
    int64_t heads;
    Vector q_weight;       // [head_dim], or null if queries and keys are not normalized
    Vector k_weight;
    double eps;
    const float* cos_sin;  // [positions, 2, head_dim / 2]
};

// Normalizes and rotates the queries of qkv into q. Normalizes and rotates the keys and stores
// them, and the values, in their slots of the cache. A token of slot −1 is not stored.
void rope_store(const RopeStoreArgs& args, const Step& step, Member& member);

}  // namespace nano
