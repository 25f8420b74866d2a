// Mixtures of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017): each token is
// multiplied with the matrices of a few experts only. Rows are sorted by expert for that.
#pragma once

#include "products.h"

namespace nano {

// Chooses the `per_token` experts with the largest logits, of equal ones the first. Their factors are
// softmax(logits), divided by the sum of a token's factors if they are normalized.
struct ChooseArgs {
    const int64_t* rows;
    int64_t experts, per_token, normalized;
    const float* logits;  // [T, experts]
    int32_t* chosen;      // [T, per_token], the largest first
    float* factors;       // [T, per_token]
};
void choose(const ChooseArgs& args, Member& member);

// Sorts the chosen experts of all tokens by expert, and in each expert by token.
struct SortArgs {
    const int64_t* rows;
    int64_t per_token, first_expert, experts;  // of this rank
    const int32_t* chosen;  // [T, per_token]
    int32_t* places;        // [T, per_token] of the rows of experts, or −1 if another rank has it
    int64_t* starts;        // [experts + 1], see `Groups`
};
void sort(const SortArgs& args, Member& member);

// Copies each token's packed row to its places.
struct GatherArgs {
    const int64_t* rows;
    int64_t per_token;
    const Weight* weight;  // for which rows are packed
    const int32_t* places;
    Packed x, out;
};
void gather(const GatherArgs& args, Member& member);

// out = the sum of the rows at a token's places, each times its factor.
struct CombineArgs {
    const int64_t* rows;
    int64_t per_token, size;
    const int32_t* places;
    const float* factors;
    const float* x;  // [rows of experts, size]
    float* out;      // [T, size]
};
void combine(const CombineArgs& args, Member& member);

}  // namespace nano
