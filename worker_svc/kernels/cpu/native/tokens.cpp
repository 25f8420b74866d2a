// Stores the tokens of sequences, and applies penalties and masks to logits.
//
// The arguments are those of worker_svc.kernels.ops.
#include <algorithm>
#include <vector>

#include "sampling.h"

namespace nano {

struct PenalizeArgs {
    float* logits;
    int64_t row_size;  // from the beginning of a row of logits to the next
    int64_t start, count;
    const int32_t* tokens;
    int64_t block_size;
    const int32_t *block_table, *table_offsets;
    int64_t num_rows;
    const int32_t *rows, *context_lens, *prompt_lens;
    const float *repetition, *presence, *frequency;
};

struct ApplyMasksArgs {
    float* logits;
    int64_t row_size;
    int64_t start, count;
    int64_t num_rows;
    const int32_t* masked;
    const int32_t* masks;
    int64_t mask_size;  // words of a mask
};

namespace {

// For a single row, waking another thread costs more than it saves.
constexpr int64_t PARALLEL_ROWS = 2;
constexpr int32_t DONE = -1;

// Calls `visit` with the column of each token of row f, from position `first` on, if it has one.
template <class Visit>
void visit_columns(const PenalizeArgs& args, int64_t f, int64_t first, const Visit& visit) {
    const int64_t row = args.rows[f], end = args.context_lens[row], size = args.block_size;
    const int32_t* blocks = args.block_table + args.table_offsets[row];
    for (int64_t block = first / size; block * size < end; block++) {
        const int32_t* tokens = args.tokens + blocks[block] * size;
        int64_t from = std::max(first - block * size, int64_t(0));
        int64_t to = std::min(end - block * size, size);
        for (int64_t i = from; i < to; i++) {
            int64_t column = tokens[i] - args.start;
            if (0 <= column && column < args.count) visit(column);
        }
    }
}

// generated: [count], all 0 before and after.
void penalize_row(const PenalizeArgs& args, int64_t f, int32_t* generated) {
    float* logits = args.logits + f * args.row_size;
    const float repetition = args.repetition[f];
    visit_columns(args, f, args.prompt_lens[f], [&](int64_t column) { generated[column]++; });
    visit_columns(args, f, 0, [&](int64_t column) {
        int32_t times = generated[column];
        if (times == DONE) return;
        float logit = logits[column];
        logit = logit > 0 ? logit / repetition : logit * repetition;
        if (times > 0) logit -= args.frequency[f] * float(times) + args.presence[f];
        logits[column] = logit;
        generated[column] = DONE;
    });
    visit_columns(args, f, 0, [&](int64_t column) { generated[column] = 0; });
}

void penalize(const PenalizeArgs& args, Member& member) {
    // Kept, because clearing it takes longer than the rest.
    static thread_local std::vector<int32_t> generated;
    if (int64_t(generated.size()) < args.count) generated.resize(args.count);
    member.each(args.num_rows, [&](int64_t f) { penalize_row(args, f, generated.data()); });
}

// Excludes the tokens in `logits`, of which the first is `start`, whose bit in `mask` is 0.
void mask_row(float* logits, int64_t start, int64_t count, const int32_t* mask) {
    for (int64_t i = 0; i < count;) {
        int64_t place = (start + i) % 32;
        uint32_t allowed = uint32_t(mask[(start + i) / 32]) >> place;
        if (place % LANES == 0 && count - i >= LANES) {
            I32s kept = splat(int32_t(allowed)) << (31 - lane_numbers()) >> 31;  // −1 or 0
            I32s some = load<I32s>(logits + i) & kept;
            store(logits + i, some | (bits<I32s>(splat(-INFINITY)) & ~kept));
            i += LANES;
        } else {
            if (!(allowed & 1)) logits[i] = -INFINITY;
            i++;
        }
    }
}

void apply_masks(const ApplyMasksArgs& args, Member& member) {
    member.each(args.num_rows, [&](int64_t m) {
        mask_row(args.logits + args.masked[m] * args.row_size, args.start, args.count,
                 args.masks + m * args.mask_size);
    });
}

}  // namespace
}  // namespace nano

using namespace nano;

// Stores the ids of the step's tokens in their slots of cache [slots]. Slot −1 is nowhere.
extern "C" void nano_store_tokens(Team*, int, int32_t* cache, const Step* step) {
    for (int64_t i = 0; i < step->tokens; i++) {
        const int32_t id = step->input_ids[i];
        if (step->slots[i] >= 0) cache[step->slots[i]] = id >= 0 ? id : step->last_tokens[-1 - id];
    }
}

extern "C" void nano_penalize(Team* team, int members, const PenalizeArgs* args) {
    bool small = args->num_rows < PARALLEL_ROWS;
    team->run(small ? 1 : members, [&](Member& member) { penalize(*args, member); });
}

extern "C" void nano_apply_masks(Team* team, int members, const ApplyMasksArgs* args) {
    bool small = args->num_rows < PARALLEL_ROWS;
    team->run(small ? 1 : members, [&](Member& member) { apply_masks(*args, member); });
}
