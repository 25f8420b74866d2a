// Samples in two levels, first a chunk of the vocabulary and then a token in it.
//
// Greedy sampling draws with the number 0 from weights that are 1 for the largest logit and 0
// elsewhere. So it takes the path of other sampling: inverse transform sampling (Devroye,
// "Non-Uniform Random Variate Generation", 1986) with a two-level search.
#include <algorithm>

#include "sampling.h"

namespace nano {

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

namespace {

// As in kernels/logits.py: beyond a bound the distribution is the one at the bound, but float32
// would overflow.
constexpr float MIN_TEMPERATURE = 1e-30f, MAX_TEMPERATURE = 1e30f;
// Logits that a member takes at once.
constexpr int64_t UNIT_LOGITS = 1 << 14;
// With fewer rows than this, one thread selects the tokens before a second thread wakes.
constexpr int64_t PARALLEL_ROWS = 16;

// The weights of a row's logits.
class Weights {
  public:
    explicit Weights(float temperature)
        : greedy(temperature == 0),
          inverse_(1 / std::min(std::max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)) {}

    const bool greedy;

    // The weights of logits of which `top` is the largest.
    F32s operator()(F32s logits, float top) const {
        if (greedy) return select(logits == splat(top), splat(1.0f), splat(0.0f));
        return exp_or_zero((logits - top) * inverse_);
    }

  private:
    const float inverse_;
};

// The largest number, or −∞ if there are none but NaN.
float largest_of(const float* numbers, int64_t count) {
    F32s tops = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES)
        tops = larger(load_logits(numbers + i, count - i), tops);
    return largest(tops);
}

float sum_of_weights(const float* logits, int64_t count, float top, const Weights& weights) {
    F32s total = splat(0.0f);
    for (int64_t i = 0; i < count; i += LANES)
        total += weights(load_logits(logits + i, count - i), top);
    return sum(total);
}

struct Choice {
    int64_t index;
    double fraction;  // the target's position within the weight at index, in [0, 1]
};

// Chooses the first index at which the cumulative sum of weights exceeds `uniform` times the total.
// `weigh(i, out)` computes the 16 weights from index i on.
//
// The chosen index never has weight 0, unless all weights are 0. Then it is 0. This also holds if
// rounding puts the target past the end, or makes a sum grow that should not grow. Sums are float64,
// so that rounding moves next to no mass between tokens.
template <class Weigh>
Choice invert(int64_t count, double uniform, const Weigh& weigh) {
    double weights[LANES], total = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i % LANES == 0) weigh(i, weights);
        total += weights[i % LANES];
    }
    double target = uniform * total, cumulative = 0, before = 0, chosen = 0;
    int64_t index = 0;
    for (int64_t i = 0; i < count && !(cumulative > target); i++) {
        if (i % LANES == 0) weigh(i, weights);
        double weight = weights[i % LANES];
        if (!(weight > 0)) continue;
        index = i, chosen = weight, before = cumulative;
        cumulative += weight;
    }
    double fraction = (target - before) / std::max(chosen, 1e-300);
    return {index, std::min(std::max(fraction, 0.0), 1.0)};
}

Choice choose_chunk(const SelectTokensArgs& args, int64_t row, const Weights& weights,
                    double uniform) {
    const float* maxima = args.maxima + row * args.all_chunks;
    const float* sums = args.sums + row * args.all_chunks;
    float top = largest_of(maxima, args.all_chunks);
    return invert(args.all_chunks, uniform, [&](int64_t i, double* out) {
        F32s weight = weights(load_logits(maxima + i, args.all_chunks - i), top);
        F32s sum = weights.greedy ? splat(1.0f) : load_logits(sums + i, args.all_chunks - i);
        store(out, convert<double>(sum) * convert<double>(weight));
    });
}

// Selects a token: in a greedy row the first of the largest logits, else the inverse of the cumulative
// distribution at the uniform number. The token is −1 if another rank has its chunk.
int32_t select(const SelectTokensArgs& args, int64_t row, float temperature, double uniform) {
    Weights weights(temperature);
    auto [chunk, fraction] = choose_chunk(args, row, weights, weights.greedy ? 0 : uniform);
    int64_t local = chunk - args.first_chunk;
    if (local < 0 || local >= args.chunks) return -1;
    int64_t start = local * args.chunk_size;
    int64_t count = std::min(args.chunk_size, args.num_tokens - start);
    const float* logits = args.logits + row * args.row_size + start;
    float top = args.maxima[row * args.all_chunks + chunk];
    auto token = invert(count, fraction, [&](int64_t i, double* out) {
        F32s weight = weights(load_logits(logits + i, count - i), top);
        store(out, convert<double>(weight));
    });
    return chunk * args.chunk_size + token.index;
}

// Computes the largest logit m of each chunk and the sum of exp((logit − m) / temperature), which is
// 0 in a greedy row.
void chunk_statistics(const ChunkStatisticsArgs& args, const Step& step, Member& member) {
    const int64_t count = step.sequences * args.chunks;
    const int64_t unit = std::max(UNIT_LOGITS / args.chunk_size, int64_t(1));
    member.each(ceil_div(count, unit), [&](int64_t number) {
        const int64_t begin = number * unit;
        for (int64_t i = begin; i < std::min(begin + unit, count); i++) {
            int64_t row = i / args.chunks, start = i % args.chunks * args.chunk_size;
            int64_t size = std::min(args.chunk_size, args.num_tokens - start);
            const float* logits = args.logits + row * args.row_size + start;
            Weights weights(step.temperatures[row]);
            float top = largest_of(logits, size);
            bool weighs = !weights.greedy && top > -INFINITY;
            args.maxima[i] = top;
            args.sums[i] = weighs ? sum_of_weights(logits, size, top, weights) : 0;
        }
    });
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" void nano_chunk_statistics(Team* team, int members, const ChunkStatisticsArgs* args,
                                      const Step* step) {
    bool small = step->sequences * args->chunks * args->chunk_size < PARALLEL_LOGITS;
    team->run(small ? 1 : members, [&](Member& m) { chunk_statistics(*args, *step, m); });
}

extern "C" void nano_select_tokens(Team* team, int members, const SelectTokensArgs* args,
                                   const Step* step) {
    bool small = step->sequences < PARALLEL_ROWS;
    team->run(small ? 1 : members, [&](Member& member) {
        member.each(step->sequences, [&](int64_t row) {
            args->tokens[row] = select(*args, row, step->temperatures[row], step->uniforms[row]);
        });
    });
}
