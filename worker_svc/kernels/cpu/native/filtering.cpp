// The histograms for the searches of worker_svc.sampling.filters.
//
// The arguments are those of worker_svc.kernels.ops, with BINS bins per row.
#include <algorithm>

#include "sampling.h"

namespace nano {

// As in kernels/logits.py.
constexpr int BIN_BITS = 8, BINS = 1 << BIN_BITS;
constexpr float LARGEST_WEIGHT = 1099511627776.0f;  // 2⁴⁰

struct HistogramArgs {
    const float* logits;
    int64_t row_size;  // from the beginning of a row of logits to the next
    int64_t num_tokens;
    int64_t num_rows;
    const int32_t* rows;
    const float *maxima, *scales;  // or null: each logit weighs 1
    const int64_t *low, *shifts;
    int64_t* bins;
};

struct PickBinsArgs {
    int64_t num_rows;
    const int64_t *bins, *targets;
    int64_t *low, *shifts, *above;
};

namespace {

constexpr int64_t MIN_KEY = 0x00800000;  // of the lowest finite logit
constexpr int64_t MAX_KEY = 0xff800000;  // of infinity
constexpr float MIN_EXPONENT = -29;      // below it, every weight is 0
constexpr int64_t UNIT_LOGITS = 1 << 14;  // of a row that a member takes at once

// The keys that `keys_of` in kernels/logits.py gives.
U32s keys_of(F32s logits) {
    I32s signed_bits = bits<I32s>(logits + 0.0f);  // without −0.0
    return bits<U32s>(signed_bits ^ (signed_bits >> 31 | INT32_MIN));
}

// A bit per lane: whether its number is at most `limit`.
uint32_t lanes_up_to(uint32_t limit, U32s numbers) {
#if defined(__AVX512F__)
    return _mm512_cmple_epu32_mask((__m512i)numbers, _mm512_set1_epi32(limit));
#elif defined(__AVX2__)
    const auto lanes_of = [=](Register<uint32_t> some) -> uint32_t {
        const auto within = some <= limit;
        return _mm256_movemask_ps((__m256)within);
    };
    return lanes_of(numbers.low) | lanes_of(numbers.high) << 8;
#else
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= uint32_t(numbers[i] <= limit) << i;
    return found;
#endif
}

// The keys that have a bin.
struct Range {
    int64_t low, high, first_bin;
    int shift;

    Range(int64_t low, int shift)
        : low(std::max(low, MIN_KEY)),
          high(std::min(low + (int64_t(BINS) << shift) - 1, MAX_KEY)),
          first_bin(low),
          shift(shift) {}
};

// Adds `weigh(logits)` to the bins of `count` logits. `weigh` gets 16 logits and sets 16 integers.
template <class Weigh>
void add_to_bins(const float* logits, int64_t count, const Range& range, const Weigh& weigh,
                 int64_t* bins) {
    if (range.low > range.high) return;
    const uint32_t low = range.low, width = range.high - range.low, first_bin = range.first_bin;
    for (int64_t i = 0; i < count; i += LANES) {
        F32s some = load_logits(logits + i, count - i);
        U32s keys = keys_of(some);
        uint32_t found = lanes_up_to(width, keys - low);
        if (!found) continue;  // as in most places
        int64_t weights[LANES];
        uint32_t places[LANES];
        weigh(some, weights);
        store(places, (keys - first_bin) >> range.shift);
        for (; found; found &= found - 1) {
            int lane = __builtin_ctz(found);
            bins[places[lane]] += weights[lane];
        }
    }
}

void count(const HistogramArgs& args, int64_t g, int64_t start, int64_t size, int64_t* bins) {
    const float* logits = args.logits + args.rows[g] * args.row_size + start;
    add_to_bins(
        logits, size, Range(args.low[g], args.shifts[g]),
        [](F32s, int64_t* weights) { std::fill_n(weights, LANES, 1); }, bins);
}

void weigh(const HistogramArgs& args, int64_t g, int64_t start, int64_t size, int64_t* bins) {
    const float* logits = args.logits + args.rows[g] * args.row_size + start;
    const float top = args.maxima[g], scale = args.scales[g];
    Range range(args.low[g], args.shifts[g]);
    range.low = std::max(range.low, int64_t(keys_of(splat(top + MIN_EXPONENT / scale))[0]));
    add_to_bins(
        logits, size, range,
        [&](F32s some, int64_t* weights) {
            float numbers[LANES];
            store(numbers, exp_or_zero((some - top) * scale) * LARGEST_WEIGHT);
            for (int i = 0; i < LANES; i++) weights[i] = numbers[i];
        },
        bins);
}

// Has `add` add each part of each row to bins of its own, and then adds these to the row's bins.
template <class Add>
void add_histograms(const HistogramArgs& args, const Add& add, Member& member) {
    const int64_t parts = ceil_div(args.num_tokens, UNIT_LOGITS);
    member.each(args.num_rows * parts, [&](int64_t unit) {
        int64_t g = unit / parts, start = unit % parts * UNIT_LOGITS;
        if (args.shifts[g] < 0) return;
        int64_t bins[BINS] = {};
        add(args, g, start, std::min(UNIT_LOGITS, args.num_tokens - start), bins);
        for (int i = 0; i < BINS; i++)
            if (bins[i])
                __atomic_fetch_add(&args.bins[g * BINS + i], bins[i], __ATOMIC_RELAXED);
    });
}

void pick_bin(const int64_t* bins, int64_t target, int64_t& low, int64_t& shift, int64_t& above) {
    int64_t number = BINS - 1;
    for (; number > 0 && above + bins[number] < target; number--) above += bins[number];
    low += number << shift;
    bool settled = shift == 0 || above + bins[number] == target;
    shift = settled ? -1 : std::max(shift - BIN_BITS, int64_t(0));
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" void nano_weigh_by_key(Team* team, int members, const HistogramArgs* args) {
    bool small = args->num_rows * args->num_tokens < PARALLEL_LOGITS;
    const auto add = args->maxima ? weigh : count;
    team->run(small ? 1 : members, [&](Member& member) { add_histograms(*args, add, member); });
}

extern "C" void nano_pick_bins(Team*, int, const PickBinsArgs* args) {
    for (int64_t g = 0; g < args->num_rows; g++)
        if (args->shifts[g] >= 0)
            pick_bin(args->bins + g * BINS, args->targets[g], args->low[g], args->shifts[g],
                     args->above[g]);
}
